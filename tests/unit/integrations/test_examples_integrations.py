"""The pages of examples/ that no other test runs do as they stand, only shorter."""

from helpers.examples_main import main_of

from csd.models.demo import toy


def test_transformers_generate(capsys):
    out = main_of("transformers_generate.py")(*toy(), samples=2, tokens=4)
    assert out.shape[0] == 6
    printed = capsys.readouterr().out
    assert "assisted generation: " in printed and "6 samples in" in printed


def test_demo(toy_folder, capsys):
    main_of("demo.py")(toy_folder, tokens=12)
    printed = capsys.readouterr().out
    assert "Samples equal token by token: 16 of 16" in printed
    assert (
        "different programs" in printed
        and "rows for 192 tokens" in printed
        and "times as fast" in printed
    )


def test_demo_says_when_other_work_makes_its_figure_doubtful(toy_folder, capsys, monkeypatch):
    main = main_of("demo.py")
    for ready, doubtful in ((5, False), (300, True)):
        times = iter([(1000, 0), (2000, ready)])
        monkeypatch.setitem(main.__globals__, "waited", lambda times=times: next(times))
        main(toy_folder, tokens=4)
        assert ("The figure is doubtful" in capsys.readouterr().out) == doubtful
