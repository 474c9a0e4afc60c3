//! Lists what the library embeds: the kernels' headers and, with the feature `embed-kernels`, the
//! fat binaries that `cargo xtask kernels` has made, or those in the folder of `KVD_KERNELS`.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Where the headers are.
const HEADERS: &str = "../../kernels/include/kvd";
/// Where `cargo xtask kernels` puts them.
const DEFAULT: &str = "../../target/kernels";

fn main() {
    println!("cargo:rerun-if-env-changed=KVD_KERNELS");
    let out = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default();
    headers(&out.join("headers.rs"));
    let out = out.join("kernels.rs");
    let images = if env::var_os("CARGO_FEATURE_EMBED_KERNELS").is_some() { find() } else { vec![] };
    let list: Vec<String> =
        images.iter().map(|path| format!("include_bytes!({:?})", path.display())).collect();
    let text = format!("&[{}]", list.join(", "));
    fs::write(&out, text).unwrap_or_else(|error| panic!("write {}: {error}", out.display()));
}

/// Name and text of each header; those of the store path are not for kernels compiled later.
fn headers(out: &Path) {
    println!("cargo:rerun-if-changed={HEADERS}");
    let entries = fs::read_dir(HEADERS).unwrap_or_else(|error| panic!("read {HEADERS}: {error}"));
    let paths = entries.flatten().filter_map(|entry| entry.path().canonicalize().ok());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.is_file()).collect();
    paths.sort();
    let list = paths.iter().map(|path| {
        let name = path.file_name().unwrap_or_default().display().to_string();
        format!("({name:?}, include_str!({:?}))", path.display().to_string())
    });
    let text = format!("&[{}]", list.collect::<Vec<_>>().join(", "));
    fs::write(out, text).unwrap_or_else(|error| panic!("write {}: {error}", out.display()));
}

fn find() -> Vec<PathBuf> {
    let folder = env::var_os("KVD_KERNELS").map_or_else(|| PathBuf::from(DEFAULT), PathBuf::from);
    println!("cargo:rerun-if-changed={}", folder.display());
    let is_image = |path: &Path| path.extension().is_some_and(|extension| extension == "fatbin");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut images: Vec<PathBuf> = entries
        .filter_map(|entry| entry.path().canonicalize().ok())
        .filter(|p| is_image(p))
        .collect();
    images.sort();
    assert!(
        !images.is_empty(),
        "no *.fatbin in {}: run `cargo xtask kernels`, or name their folder in KVD_KERNELS",
        folder.display()
    );
    images
}
