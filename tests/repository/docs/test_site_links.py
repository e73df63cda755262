"""The check of the site's links that `make docs` ends with."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
spec = spec_from_file_location("site_links", ROOT / "docs" / "site_links.py")
site_links = module_from_spec(spec)
spec.loader.exec_module(site_links)


@pytest.fixture
def site(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a b.svg").write_text("")
    (tmp_path / "deep" / "index.html").write_text('<h2 id="one">1</h2><a href="../">up</a>')
    return tmp_path


@pytest.mark.parametrize(
    ("link", "leads"),
    [
        ("deep/", True),
        ("deep/#one", True),
        ("deep/index.html#one", True),
        ("/deep/", True),
        ("#here", True),
        ("", True),
        ("a%20b.svg", True),
        ("a%20b.svg#part", True),
        ("https://host.org/none", True),
        ("mailto:a@b.org", True),
        ("deep/#two", False),
        ("#there", False),
        ("none/", False),
        ("none.svg", False),
        ("/none/", False),
    ],
)
@pytest.mark.parametrize("form", ['<a href="{}">x</a>', '<img src="{}">'])
def test_a_link_that_leads_nowhere_is_found(site, link, leads, form):
    (site / "index.html").write_text('<p id="here">' + form.format(link))
    assert site_links.broken(site) == ([] if leads else [f"index.html: {link}"])


def test_a_build_with_such_a_link_fails(site):
    pytest.importorskip("mkdocs", reason="needs mkdocs: make install-docs")
    from mkdocs.exceptions import PluginError

    (site / "index.html").write_text('<a href="none">x</a>')
    with pytest.raises(PluginError, match=r"index\.html: none"):
        site_links.on_post_build({"site_dir": str(site)})


def test_make_docs_runs_it():
    assert "docs/site_links.py" in (ROOT / "mkdocs.yml").read_text()
