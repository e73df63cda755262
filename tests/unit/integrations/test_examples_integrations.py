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
    assert "Samples equal token by token to plain sampling: 8 of 8" in capsys.readouterr().out
