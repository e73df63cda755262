"""The engine: from the arguments of `csd.generate` to finished samples.

    session.py    samples that go on in turns, with appended tokens and forks
    generate.py   `csd.generate` and `csd.stream`: one engine is kept per model
    engine.py     `Engine`: a model, its caches and step times, and the calls that run over them
    call.py       one call: its checked arguments as requests and settings
    scheduler.py  the loop: a plan, a step, its record, tokens of samples, their ends
    plan.py       the view, the plan and the events of a step, as plain values
    policy.py     the plans of a call: whose prompt is read, whose sample gets a slot
    slots.py      applies plans: admits requests, reads prompts, starts samples, ends requests
    options/      arguments: default, check, flag and description of each; grammars, thoughts
    requests/     prompts and their samples, edits of slots, past samples
    resources/    `EngineModel`, `Caches` and `StepTimes`, which calls share
    step/         the step: drafts, one pass, verification; its budget; prefill of prompts
    rules/        changes of logits before verification: tables, grammars, users' functions
    results/      records of steps, samples, statistics, log-probabilities, views
    first_call/   checks, compilation and timing, once per machine

A call of `csd.generate`: `generate.py` finds the engine, `Call.read` makes the requests, the
engine allocates caches for them (`resources`), and a `Scheduler` runs steps until all samples have
ended. `csd.serve` runs the same loop with a policy whose requests arrive between two steps.
"""
