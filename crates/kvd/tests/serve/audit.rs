//! The audit log of a process, and tokens as its operators use them.

use super::process::{Process, kvd, output, run_at};
use std::path::Path;

/// The two lines of `kvd token`: the token, and its hash.
fn make_token() -> [String; 2] {
    let mut command = kvd();
    command.arg("token");
    let text = String::from_utf8(output(command).stdout).expect("a set-up");
    let token =
        text.lines().next().expect("a set-up").split_once(": ").expect("a set-up").1.to_owned();
    let hash = text.split('"').nth(1).expect("a set-up").to_owned();
    assert!(token.starts_with("kvd_") && hash.starts_with("sha256:"), "{text}");
    [token, hash]
}

/// Runs a command with the token of a file.
fn run_with_token(endpoint: &str, token_file: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let file = token_file.display().to_string();
    run_at(endpoint, &[arguments, &["--token-file", &file]].concat())
}

#[test]
fn refusals_and_what_operators_do_are_logged_without_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let [[token, hash], [stranger, _], [next, next_hash]] = [(); 3].map(|()| make_token());
    let principal = |hash: &str| {
        format!(
            "[[principals]]\nname = \"ops\"\nnamespaces = [\"*\"]\nroles = [\"operate\"]\n\
             tokens = [\"{hash}\"]\n"
        )
    };
    std::fs::write(path("principals.toml"), principal(&hash)).unwrap();
    for (name, token) in [("ops", &token), ("stranger", &stranger), ("next", &next)] {
        std::fs::write(path(name), format!("{token}\n")).unwrap();
    }
    let set = format!("access.principals={}", path("principals.toml").display());
    // As long as nobody sends SIGHUP.
    let flags = ["--set", &set, "--set", "access.check_files_ms=3600000"];
    let daemon = Process::start(&flags);
    let endpoint = format!("http://{}", daemon.tcp());
    let (code, text) = run_with_token(&endpoint, &path("ops"), &["namespaces", "list"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = run_with_token(&endpoint, &path("stranger"), &["models", "list"]);
    assert!(code == Some(1) && text.contains("UNAUTHENTICATED"), "{text}");
    let (_, text) = run_with_token(&endpoint, &path("ops"), &["sessions", "close", "7"]);
    assert!(text.contains("UNKNOWN_SESSION") || text.contains("no session"), "{text}");
    let (code, text) = run_with_token(&endpoint, &path("none"), &["models", "list"]);
    assert!(code == Some(64) && text.contains("none"), "{text}");
    // Commands that work as engines do show it too: known, and without the role.
    #[cfg(feature = "eval")]
    {
        let out = path("artefact").display().to_string();
        let calibrate =
            ["calibrate", "--sequence", "1", "--codec", "vecinfer-2", "--out", out.as_str()];
        for command in [&calibrate[..], &["bench", "mixed", "--seconds", "1", "--context", "64"]] {
            let (code, text) = run_with_token(&endpoint, &path("ops"), command);
            assert_ne!(code, Some(0), "{text}");
            assert!(!text.contains("UNAUTHENTICATED") && !text.contains("shows no"), "{text}");
            let (_, text) = run_at(&endpoint, command);
            assert!(text.contains("shows no principal"), "{text}");
        }
    }
    // Rotated by file and SIGHUP.
    assert!(
        run_with_token(&endpoint, &path("next"), &["models", "list"]).1.contains("UNAUTHENTICATED")
    );
    std::fs::write(path("principals.toml"), principal(&next_hash)).unwrap();
    daemon.signal("HUP");
    let began = std::time::Instant::now();
    while run_with_token(&endpoint, &path("next"), &["models", "list"]).0 != Some(0) {
        assert!(began.elapsed().as_secs() < 20, "the new token is never taken");
    }
    assert!(
        run_with_token(&endpoint, &path("ops"), &["models", "list"]).1.contains("UNAUTHENTICATED")
    );
    daemon.signal("TERM");
    let log = daemon.wait().log;
    let audit: Vec<_> = log.lines().filter(|line| line.contains("\"kvd::audit\"")).collect();
    let has =
        |parts: &[&str]| audit.iter().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(
        has(&["refused", "ListModels", "UNAUTHENTICATED", "\"namespace\":\"default\""]),
        "{log}"
    );
    assert!(has(&["administrative call", "CloseSession", "\"principal\":\"ops\""]), "{log}");
    assert!(has(&["read anew", "principals"]), "{log}");
    for secret in [&token, &stranger, &next, &hash, &next_hash] {
        assert!(!log.contains(&**secret), "{log}");
    }
}
