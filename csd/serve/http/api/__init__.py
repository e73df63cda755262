"""OpenAI's API: bodies of requests, and answers to them, whole or as events.

    request.py         parsing and checks of a body
    fields.py          the engine's option for each field; fields that are ignored or refused, and
                       values without effect
    tools.py           calls of tools, read from texts or made certain by a grammar
    calls/             the formats of such calls, and their parser
    response.py        choices, log-probabilities and usage
    events.py          the same as events, while tokens are drawn
    responses_body.py  a body of /v1/responses as one of a chat completion
    responses.py       its answer, whole or as events

Access, limits and errors of clients are outside of this folder.
"""
