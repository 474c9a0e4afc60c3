//! The checked-in code is what `proto/` generates.

// One generator for both users of it. A crate for it would have to be a dependency of this one.
#[path = "../../../xtask/src/generate.rs"]
mod generate;

use std::path::Path;

#[test]
fn checked_in_code_is_what_the_proto_generates() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let scratch = tempfile::tempdir().unwrap();
    let stale = generate::find_stale(&root, &root.join(generate::OUTPUT), scratch.path()).unwrap();
    assert!(stale.is_empty(), "{stale:?} differ from proto/: run `cargo xtask gen`");
}

#[test]
fn missing_or_changed_output_is_stale() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (out, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut expected = generate::FILES.to_vec();
    assert_eq!(generate::find_stale(&root, out.path(), scratch.path()).unwrap(), expected);
    generate::generate_code(&root, out.path()).unwrap();
    std::fs::write(out.path().join(expected.remove(1)), b"old").unwrap();
    let stale = generate::find_stale(&root, out.path(), scratch.path()).unwrap();
    assert_eq!(stale, generate::FILES[1..]);
}
