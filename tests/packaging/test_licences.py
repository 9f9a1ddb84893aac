"""The file of licence texts against the sources of the crates that the extension is built from."""

from __future__ import annotations

import licences


def test_every_crate_has_its_texts_in_the_file() -> None:
    assert licences.TEXTS.read_text() == licences.third_party_licences(), "run `make licences`"


def test_what_is_linked_is_found_with_all_its_texts() -> None:
    crates = {crate.name: crate for crate in licences.crates()}
    assert {"ring", "rustls", "pyo3", "serde_json", "libc"} <= set(crates)
    assert not {name for name in crates if name.startswith("gradring")}
    names = {path.name for path in crates["ring"].files()}
    assert {"LICENSE", "LICENSE-BoringSSL"} <= names  # it has taken over code
