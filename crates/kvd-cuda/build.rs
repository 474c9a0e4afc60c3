//! With the feature `embed-kernels`: lists the fat binaries that `cargo xtask kernels` has made, or
//! those in the folder of `KVD_KERNELS`, for the library to embed.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Where `cargo xtask kernels` puts them.
const DEFAULT: &str = "../../target/kernels";

fn main() {
    println!("cargo:rerun-if-env-changed=KVD_KERNELS");
    let out = env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default().join("kernels.rs");
    let images = if env::var_os("CARGO_FEATURE_EMBED_KERNELS").is_some() { find() } else { vec![] };
    let list: Vec<String> =
        images.iter().map(|path| format!("include_bytes!({:?})", path.display())).collect();
    let text = format!("&[{}]", list.join(", "));
    fs::write(&out, text).unwrap_or_else(|error| panic!("write {}: {error}", out.display()));
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
