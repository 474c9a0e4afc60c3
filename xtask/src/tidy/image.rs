//! Whether `deploy/Dockerfile`, which nothing here builds, names what the workspace has: the
//! version of Rust, packages, their features, profiles, and NVRTC as CI has it and kvd looks it up.

use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::Path;

const DOCKERFILE: &str = "deploy/Dockerfile";
/// The wheel of NVRTC, and its library.
const NVRTC: [&str; 2] = ["nvidia-cuda-nvrtc==", "libnvrtc.so."];

/// Texts of the workspace that the file is held against.
struct WorkspaceTexts {
    toolchain: String,
    manifest: String,
    /// Which compiler tests are run with.
    ci: String,
    /// By which names it is looked for.
    compiler: String,
}

/// Checks the file against the manifests under `root` and what `cargo metadata` says of them.
pub(super) fn check_image(root: &Path, metadata: &Value) -> Result<Vec<String>> {
    let read = |path: &str| fs::read_to_string(root.join(path)).with_context(|| path.to_owned());
    let texts = WorkspaceTexts {
        toolchain: read("rust-toolchain.toml")?,
        manifest: read("Cargo.toml")?,
        ci: read(".ci/parts/nvrtc.sh")?,
        compiler: read("crates/kvd-cuda/src/driver/nvrtc.rs")?,
    };
    Ok(list_findings(&read(DOCKERFILE)?, &texts, metadata))
}

fn list_findings(image: &str, texts: &WorkspaceTexts, metadata: &Value) -> Vec<String> {
    let WorkspaceTexts { toolchain, manifest, ci, compiler } = texts;
    let channel = toolchain.lines().find_map(|line| line.strip_prefix("channel = "));
    let channel = channel.unwrap_or_default().trim_matches('"');
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let package = |name: &str| packages.iter().find(|package| package["name"] == name);
    let mut findings = Vec::new();
    let mut built = None;
    let code = image.lines().filter(|line| !line.starts_with('#'));
    let words: Vec<&str> = code.flat_map(str::split_whitespace).collect();
    for (index, word) in words.iter().enumerate() {
        let next = words.get(index + 1).copied().unwrap_or_default();
        let version = word.strip_prefix("rust:").and_then(|tag| tag.split('-').next());
        let version = version.or_else(|| word.strip_prefix("RUSTUP_TOOLCHAIN="));
        let known = match *word {
            "-p" => {
                built = package(next);
                built.is_some()
            }
            "--features" => built.is_some_and(|package| package["features"].get(next).is_some()),
            "--profile" => manifest.contains(&format!("[profile.{next}]")),
            word if word.starts_with(NVRTC[0]) => {
                ci.split_whitespace().any(|is| is.trim_end_matches(';') == word)
            }
            word => match word.rsplit('/').next() {
                Some(file) if file.starts_with(NVRTC[1]) => {
                    compiler.contains(&format!("\"{file}\""))
                }
                _ => version.is_none_or(|version| version == channel),
            },
        };
        if !known {
            findings.push(format!("{DOCKERFILE}: {word} {next}: the workspace has no such thing"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_workspace_does_not_have_is_found() {
        let metadata = json!({"packages": [{"name": "kvd", "features": {"gpu": []}}]});
        let texts = WorkspaceTexts {
            toolchain: "[toolchain]\nchannel = \"1.2.3\"\n".to_owned(),
            manifest: "[profile.dist]\n".to_owned(),
            ci: "if pip install nvidia-cuda-nvrtc==2.0.11; then".to_owned(),
            compiler: "const NAMES: [&str; 2] = [\"libnvrtc.so.2\", \"libnvrtc.so.1\"];".to_owned(),
        };
        let of = |image: &str| list_findings(image, &texts, &metadata);
        let good = "# rust:0.9 -p nothing\nFROM rust:1.2.3-slim\nENV RUSTUP_TOOLCHAIN=1.2.3\n\
                    RUN cargo build --profile dist -p kvd --features gpu\n\
                    RUN pip install nvidia-cuda-nvrtc==2.0.11\n\
                    COPY --from=nvrtc /lib/libnvrtc.so.2 /lib/libnvrtc-builtins.so.2.0 /lib/\n";
        assert_eq!(of(good), Vec::<String>::new());
        let changes = [
            ("rust:1.2.3-slim", "rust:1.2-slim"),
            ("TOOLCHAIN=1.2.3", "TOOLCHAIN=1.2.4"),
            ("--profile dist", "--profile small"),
            ("-p kvd", "-p kv"),
            ("--features gpu", "--features cuda"),
            ("nvrtc==2.0.11", "nvrtc==2.0.1"),
            ("libnvrtc.so.2", "libnvrtc.so.3"),
        ];
        for (from, to) in changes {
            assert!(!of(&good.replace(from, to)).is_empty(), "{to}");
        }
    }
}
