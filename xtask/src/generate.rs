//! The generator of `crates/kvd-proto/src/gen`: `protox` parses, `tonic-prost-build` writes.
//!
//! `xtask gen` runs it, and its test notices stale output. Both are pure Rust: nobody needs
//! `protoc`.

use anyhow::{Context, Result};
use protox::prost::Message;
use std::fs;
use std::path::Path;

/// Files that the generator writes: Rust code, and the descriptor set that gRPC reflection serves.
pub(crate) const FILES: [&str; 2] = ["kvd.v1.rs", "kvd.v1.bin"];

/// Where the checked-in output lies, from the repository root.
pub(crate) const OUTPUT: &str = "crates/kvd-proto/src/gen";

/// Compiles the `.proto` files under `root` into `out`.
pub(crate) fn generate_code(root: &Path, out: &Path) -> Result<()> {
    let include = root.join("proto");
    let source = include.join("kvd/v1/kvd.proto");
    let mut set = protox::compile([&source], [&include]).context("parse proto/kvd/v1/kvd.proto")?;
    tonic_prost_build::configure()
        .out_dir(out)
        .bytes(".")
        .emit_rerun_if_changed(false)
        .compile_fds(set.clone())
        .context("generate Rust code")?;
    // Comments triple the descriptor and no reflection client shows them.
    for file in &mut set.file {
        file.source_code_info = None;
    }
    fs::write(out.join(FILES[1]), set.encode_to_vec()).context("write the descriptor set")
}

/// The names among [`FILES`] whose content under `out` is not what `root` generates into
/// `scratch`.
pub(crate) fn find_stale(root: &Path, out: &Path, scratch: &Path) -> Result<Vec<&'static str>> {
    generate_code(root, scratch)?;
    let mut stale = Vec::new();
    for name in FILES {
        let fresh = fs::read(scratch.join(name)).with_context(|| format!("read {name}"))?;
        // A missing file is as stale as a different one.
        if fs::read(out.join(name)).ok().as_ref() != Some(&fresh) {
            stale.push(name);
        }
    }
    Ok(stale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checked_in_code_is_what_the_proto_generates() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let scratch = tempfile::tempdir().unwrap();
        let stale = find_stale(&root, &root.join(OUTPUT), scratch.path()).unwrap();
        assert!(stale.is_empty(), "{stale:?} differ from proto/: run `cargo xtask gen`");
    }

    #[test]
    fn missing_or_changed_output_is_stale() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let (out, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut expected = FILES.to_vec();
        assert_eq!(find_stale(&root, out.path(), scratch.path()).unwrap(), expected);
        generate_code(&root, out.path()).unwrap();
        fs::write(out.path().join(expected.remove(1)), b"old").unwrap();
        let stale = find_stale(&root, out.path(), scratch.path()).unwrap();
        assert_eq!(stale, FILES[1..]);
    }
}
