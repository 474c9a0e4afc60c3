//! Says which commit a binary was built from, as `KVD_COMMIT`: that of the checkout, else what the
//! environment says under that name, as builds of images do; `unknown` where neither is.

use std::fs;
use std::process::Command;

/// The workspace, from here.
const ROOT: &str = "../..";

fn main() {
    println!("cargo:rerun-if-env-changed=KVD_COMMIT");
    let commit = checkout_commit().or_else(given_commit).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=KVD_COMMIT={commit}");
}

/// The commit that the environment names; nothing that would break a line or a label.
fn given_commit() -> Option<String> {
    let commit = std::env::var("KVD_COMMIT").ok()?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._+".contains(c);
    let commit = commit.trim();
    (!commit.is_empty() && commit.len() <= 64 && commit.chars().all(is_name))
        .then(|| commit.to_owned())
}

fn checkout_commit() -> Option<String> {
    // A tarball may lie in somebody else's checkout, whose commit says nothing.
    if !run_git(&["rev-parse", "--show-prefix"])?.is_empty() {
        return None;
    }
    // Every commit and every change of branch is written down there.
    let log = run_git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
    println!("cargo:rerun-if-changed={log}");
    // What makes the binary another one than that of the commit.
    for package in fs::read_dir("..").ok()?.flatten() {
        println!("cargo:rerun-if-changed={}", package.path().join("src").display());
    }
    for other in ["Cargo.toml", "Cargo.lock", "kernels"] {
        println!("cargo:rerun-if-changed={ROOT}/{other}");
    }
    run_git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
}

fn run_git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(ROOT).args(arguments).output().ok()?;
    let text = output.status.success().then_some(output.stdout)?;
    Some(String::from_utf8(text).ok()?.trim().to_owned())
}
