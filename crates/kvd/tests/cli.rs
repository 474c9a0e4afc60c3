//! The command line as a person meets it: what it prints, how wide, and what it refuses at once.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest time that a refusal may take on a busy machine; the work itself takes longer.
const MOMENT: Duration = Duration::from_secs(5);

/// `kvd`, undisturbed by settings of whoever runs the tests.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("KVD_")) {
        command.env_remove(name);
    }
    command.args(arguments);
    command
}

fn kvd(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn printed(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn config_prints_what_config_reads_also_with_settings_from_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    let flags =
        ["config", "--pool", "1500 MiB", "--listen", "localhost:7171", "--unix", "/run/k v.sock"];
    let mut first = command(&flags);
    first.env("KVD_LIMITS__MODELS_MAX", "7").env("KVD_ADMIN__LISTEN", "");
    let text = printed(first);
    for part in [
        "pool_bytes = \"1500 MiB\"  # default: \"1 GiB\"",
        "listen_tcp = \"localhost:7171\"",
        "listen_unix = \"/run/k v.sock\"",
        "listen_region = \"\"",
        "models_max = 7",
        "listen = \"\"",
        "message_bytes_max = \"64 MiB\"",
        "allowed = [\"default\"]",
    ] {
        assert!(text.lines().any(|line| line.starts_with(part)), "no {part} in\n{text}");
    }
    let again = |text: &str| {
        std::fs::write(&file, text).unwrap();
        printed(command(&["config", "--config", file.to_str().unwrap()]))
    };
    assert_eq!(again(&text), text);
    // As editors of other systems leave it.
    assert_eq!(again(&text.replace('\n', "\r\n")), text);
    let defaults = printed(command(&["config"]));
    assert!(!defaults.contains("# default"), "{defaults}");
    assert_eq!(again("\u{feff}# nothing\n"), defaults);
    assert_eq!(again(""), defaults);
}

#[test]
fn empty_variables_are_no_settings() {
    let defaults = printed(command(&["config"]));
    let mut empty = command(&["config"]);
    for name in ["KVD_CONFIG", "KVD_DEVICE__THREADS", "KVD_DEVICE__POOL_BYTES", "KVD_LOG__FILTER"] {
        empty.env(name, "");
    }
    for name in ["KVD_DEVICE__DEVICE", "KVD_DEVICE__PREFAULT", "KVD_NAMESPACES__ALLOWED"] {
        empty.env(name, " ");
    }
    assert_eq!(printed(empty), defaults);
    // Where an empty text says something it is said.
    let mut off = command(&["config"]);
    off.env("KVD_ADMIN__LISTEN", "").env("KVD_CONFIG", "");
    assert!(printed(off).contains("listen = \"\"  # default: \"127.0.0.1:9470\""));
    let mut named = command(&["config"]);
    named.env("KVD_CONFIG", "/no/such/file");
    let output = named.output().unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/file"));
}

#[test]
fn every_help_has_an_example_and_fits_the_terminal() {
    let mut commands = vec!["", "serve", "config", "codecs", "plan", "dashboard", "metrics"];
    commands.extend(["sequences", "sequences list", "sequences close"]);
    commands.extend(["health", "status", "top", "models", "namespaces", "completions", "token"]);
    commands.extend(["namespaces list", "namespaces set", "man-pages"]);
    commands.extend(["describe", "describe codec", "describe model"]);
    commands.extend(["sessions", "sessions list", "sessions close"]);
    commands.extend(["bench", "bench attend", "bench scores", "bench codec", "bench store"]);
    if cfg!(feature = "eval") {
        commands.extend(["bench transport", "demo", "eval", "calibrate"]);
    }
    for name in commands {
        let mut arguments: Vec<&str> = name.split_whitespace().collect();
        arguments.push("--help");
        for columns in [80, 200] {
            let mut help = command(&arguments);
            help.env("COLUMNS", columns.to_string());
            let help = printed(help);
            assert!(help.contains("Example"), "{name}: {help}");
            assert!(help.contains("\n  kvd "), "{name}: {help}");
            // Examples are lines to copy: they are not broken.
            let about = help.split("Example").next().unwrap();
            let longest = about.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= columns.min(100), "{name}, {longest} columns: {help}");
            let longest = help.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= 100, "{name}, {longest} columns: {help}");
        }
    }
}

#[test]
fn the_version_names_the_commit() {
    let text = printed(command(&["--version"]));
    let commit = text.trim().strip_prefix(concat!("kvd ", env!("CARGO_PKG_VERSION"), " ("));
    let commit = commit.and_then(|commit| commit.strip_suffix(')')).expect("kvd VERSION (COMMIT)");
    let number = commit.strip_suffix("-dirty").unwrap_or(commit);
    let hexadecimal = number.len() >= 7 && number.bytes().all(|b| b.is_ascii_hexdigit());
    assert!(commit == "unknown" || hexadecimal, "{text}");
}

#[test]
fn who_closes_the_output_early_hears_nothing() {
    for arguments in [&["codecs", "--wide"][..], &["config", "--print-default"], &["dashboard"]] {
        let mut command = command(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn tables_of_presets_fit_the_terminal() {
    for arguments in
        [&["codecs"][..], &["plan", "--table"], &["plan", "--table", "--device", "a100"]]
    {
        let text = printed(command(arguments));
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(longest <= 100, "{arguments:?}, {longest} columns: {text}");
        for preset in kvd_codec::presets() {
            assert!(text.contains(preset.name), "{arguments:?}: {text}");
        }
    }
    let json: serde_json::Value =
        serde_json::from_str(&printed(command(&["codecs", "--json"]))).unwrap();
    let presets = json["presets"].as_array().unwrap();
    let of = |name: &str| presets.iter().find(|preset| preset["name"] == name).unwrap();
    assert_eq!(presets.len(), kvd_codec::presets().len());
    assert_eq!(
        (&of("kivi-4")["needs_calibration"], &of("kvd-2")["needs_calibration"]),
        (&false.into(), &true.into())
    );
    assert!(
        of("kvd-2")["saving"][1]["ratio"].as_f64() > of("kivi-4")["saving"][1]["ratio"].as_f64()
    );
}

/// Output of `kvd` at a terminal, standard error among it; nothing where there is no `script`.
#[expect(clippy::print_stderr, reason = "a test that cannot run says why")]
fn at_terminal(arguments: &str) -> Option<String> {
    let line = format!("{} {arguments}", env!("CARGO_BIN_EXE_kvd"));
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("KVD_")) {
        script.env_remove(name);
    }
    match script.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{said}");
            Some(said)
        }
        Err(error) => {
            eprintln!("SKIP terminal: no script of util-linux: {error}");
            None
        }
    }
}

#[test]
fn a_person_at_a_terminal_hears_at_once_what_takes_time() {
    let Some(said) = at_terminal("codecs") else { return };
    let (before, table) = said.split_once('\n').unwrap();
    assert!(before.starts_with("kvd: the table follows"), "{said}");
    assert!(table.contains("choose it when"), "{said}");
    let piped = kvd(&["codecs", "--json"]).stderr;
    assert!(!String::from_utf8_lossy(&piped).contains("the table follows"));
}

#[cfg(feature = "eval")]
#[test]
fn the_bar_says_whose_time_is_left() {
    let short = "eval --codec raw --passages 1 --tokens 128 --json -";
    let Some(said) = at_terminal(short) else { return };
    assert!(said.contains("left of this stage"), "{said}");
}

#[test]
fn a_plan_says_when_its_gpu_is_assumed() {
    for flags in [&["--table"][..], &["--codec", "kivi-4"]] {
        let plan = |further: &[&str]| {
            let mut all = vec!["plan"];
            all.extend(flags.iter().chain(further));
            printed(command(&all))
        };
        let assumed = plan(&[]);
        assert!(assumed.lines().next().unwrap().contains("--device names no GPU"), "{assumed}");
        let named = plan(&["--device", "h100"]);
        assert!(!named.contains("--device") && assumed.ends_with(&named), "{assumed}\n{named}");
    }
}

#[test]
fn a_size_below_zero_is_a_size_that_is_none() {
    let refused = kvd(&["config", "--pool", "-1"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(64), "{said}");
    assert!(said.contains("device.pool_bytes") && said.contains("a size such as"), "{said}");
}

#[test]
fn a_variable_that_nothing_reads_is_told_beside_the_configuration() {
    let mut config = command(&["config"]);
    let printed = config.env("KVD_POOL", "4GiB").output().unwrap();
    let said = String::from_utf8_lossy(&printed.stderr).into_owned();
    assert!(printed.status.success(), "{said}");
    assert!(said.contains("KVD_POOL is read by nothing; is KVD_DEVICE__POOL_BYTES"), "{said}");
}

#[test]
fn metrics_are_listed_with_type_labels_and_meaning() {
    let text = printed(command(&["metrics"]));
    assert!(
        text.contains("kvd_pool_used_bytes (gauge by device): Page memory in use.\n"),
        "{text}"
    );
    assert!(text.contains("kvd_held_bytes (gauge by namespace, model, codec): "), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let some = printed(command(&["metrics", "quota"]));
    let listed = some.lines().filter(|line| line.starts_with("kvd_"));
    assert!(listed.clone().count() >= 3 && listed.clone().all(|line| line.contains("quota")));
    let json: serde_json::Value =
        serde_json::from_str(&printed(command(&["metrics", "--json"]))).unwrap();
    let names = json.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap());
    let all = text.lines().filter(|line| line.starts_with("kvd_"));
    assert!(names.eq(all.map(|line| line.split(' ').next().unwrap())));
    refused(&["metrics", "no_such_name"], "no metric has \"no_such_name\" in its name");
}

/// Refused with 64, in a moment, and with a hint.
fn refused(arguments: &[&str], part: &str) {
    let began = Instant::now();
    let output = kvd(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(64), "{arguments:?}: {said}");
    assert!(said.contains(part), "{arguments:?} does not say {part:?}: {said}");
    assert!(began.elapsed() < MOMENT, "{arguments:?} took {:?}", began.elapsed());
}

#[test]
fn wrong_arguments_are_refused_at_once() {
    for (arguments, part) in [
        (&["plan", "--device", "rtx9999"][..], "rtx4090"),
        (&["plan", "--codec", "zip"], "kvd codecs"),
        (&["plan", "--head-dim", "7"], "head"),
        (&["plan", "--group", "0"], "--group"),
        (&["serve", "--pool", "lots"], "a size such as 4 GiB"),
        (&["serve", "--listen", "localhost"], "localhost:7070"),
        (&["serve", "--set", "device.threads"], "section.key=value"),
        (&["config", "--set", "log.filter=verbose"], "log.filter"),
        (&["bench", "attend", "--buffer", "lots"], "a size such as 4 GiB"),
        (&["bench", "attend", "--codec", "k=raw; v=fp9"], "character 9"),
        (&["codecs", "--wide", "--json"], "--json"),
        (&["man-pages", "/proc/none"], "/proc/none"),
        (&["nonsense"], "nonsense"),
    ] {
        refused(arguments, part);
    }
}

#[test]
fn a_wrong_codec_is_told_the_nearest_and_the_list_in_short_lines() {
    let mut commands =
        vec![&["plan", "--codec"][..], &["bench", "attend", "--codec"], &["describe", "codec"]];
    if cfg!(feature = "eval") {
        commands.extend([&["eval", "--codec"][..], &["demo", "--codec"]]);
    }
    for command in commands {
        for (codec, hint) in [("kivi4", "is kivi-4 meant?"), ("wrong", "a preset such as kivi-4")] {
            let arguments = [command, &[codec]].concat();
            refused(&arguments, hint);
            refused(&arguments, "\n  `kvd codecs` lists all presets");
            let said = String::from_utf8(kvd(&arguments).stderr).unwrap();
            assert!(said.lines().all(|line| line.chars().count() <= 100), "{said}");
            assert!(!said.contains("character 0"), "{said}");
        }
    }
}

#[cfg(feature = "eval")]
#[test]
fn files_of_another_kind_are_refused_as_wrong_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, [0xFFu8; 4096]).unwrap();
    let file = file.to_str().unwrap();
    let policy = format!("@{file}");
    let out = ["--codec", "kvd-2", "--out", "x"];
    let short = ["--tokens", "64", "--passages", "1"];
    for arguments in [
        [&["calibrate", "--samples", file][..], &out].concat(),
        [&["calibrate", "--text", file][..], &out].concat(),
        [&["eval", "--codec", "raw", "--text", file][..], &short].concat(),
        [&["eval", "--codec", "kvd-2", "--calibration", file][..], &short].concat(),
        vec!["eval", "--codec", policy.as_str()],
        vec!["cache", "simulate", "--trace", file],
        vec!["serve", "--config", file],
        vec!["config", "--config", file],
    ] {
        refused(&arguments, file);
    }
}

#[cfg(feature = "eval")]
#[test]
fn wrong_arguments_are_refused_before_a_model_runs() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none/x");
    let missing = missing.to_str().unwrap();
    let folder = dir.path().to_str().unwrap();
    for (arguments, part) in [
        (&["calibrate", "--codec", "kivi-4", "--out", "x"][..], "needs no calibration"),
        (&["calibrate", "--codec", "kvd-2", "--codec", "fp8", "--out", "x"], "fp8 needs no"),
        (&["calibrate", "--codec", "kvd-2", "--out", missing], "--out"),
        (&["calibrate", "--codec", "kvd-2", "--out", folder], "--out"),
        (&["calibrate", "--dump", missing], "--dump"),
        (&["calibrate", "--codec", "kvd-2", "--out", "x", "--samples", missing], "--samples"),
        (&["calibrate", "--codec", "kvd-2", "--out", "x", "--window", "4096"], "--window 4096"),
        (&["eval", "--codec", "raw", "--markdown", missing], "--markdown"),
        (&["eval", "--codec", "raw", "--json", missing], "--json"),
        (&["eval", "--codec", "raw", "--svg", folder], "--svg"),
        (&["eval", "--search", "--budget-bits", "3", "--policy", missing], "--policy"),
        (&["eval", "--search", "--budget-bits", "3", "--artefact", missing], "--artefact"),
        (&["eval", "--search", "--budget-bits", "0"], "0.5 to 32 bits"),
        (&["eval", "--search", "--budget-bits", "100"], "0.5 to 32 bits"),
        (&["eval", "--codec", "raw", "--pool", "lots"], "a size such as 4 GiB"),
        (&["eval", "--model", missing], "--model"),
        (&["demo", "--passages", "0"], "--passages"),
        (&["demo", "--tokens", "4000"], "positions"),
        (&["demo", "--codec", "k=raw"], "character 5"),
        (&["demo", "--admin", "here"], "admin.listen"),
    ] {
        refused(arguments, part);
    }
    assert!(!Path::new("x").exists() && !dir.path().join("none").exists());
}

#[cfg(feature = "eval")]
#[test]
fn a_policy_file_may_begin_with_a_comment_wherever_codecs_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.policy");
    std::fs::write(&path, "\u{feff}# for production\r\nkivi-4; recent=64\r\n# the end").unwrap();
    let codec = format!("@{}", path.display());
    let short = ["--tokens", "64", "--passages", "1"];
    let eval = kvd(&[&["eval", "--codec", &codec, "--json", "-"], &short[..]].concat());
    assert!(eval.status.success(), "{}", String::from_utf8_lossy(&eval.stderr));
    let report: serde_json::Value = serde_json::from_slice(&eval.stdout).unwrap();
    let spec = report["blocks"][0]["rows"][0]["codec_spec"].as_str().unwrap();
    assert!(spec.starts_with("k=uniform(b=4") && spec.ends_with("recent=64"), "{spec}");
    let plan = printed(command(&["plan", "--codec", &codec]));
    let longest = plan.lines().map(|line| line.chars().count()).max().unwrap();
    assert!(longest <= 100, "{longest} columns: {plan}");
}

#[cfg(feature = "eval")]
#[test]
fn a_long_command_tells_how_far_it_is_where_no_bar_can_be_drawn() {
    let output = kvd(&["eval", "--codec", "raw", "--passages", "1", "--tokens", "1024"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let seconds = text.lines().last().and_then(|line| line.split(' ').next()?.parse::<f64>().ok());
    // A machine on which it takes no three seconds has nothing to tell.
    if seconds.unwrap() >= 3.0 {
        let line = said.lines().find(|line| line.starts_with("kvd: ")).expect(&said);
        assert!(line.contains(" s so far"), "{said}");
    }
    let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
    assert!(longest <= 100, "{longest} columns: {text}");
}

#[test]
fn shells_complete_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = printed(command(&["completions", shell]));
        assert!(script.contains("health") && script.contains("sequences"), "{shell}");
    }
    assert_eq!(kvd(&["completions", "tcl"]).status.code(), Some(64));
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    printed(command(&["man-pages", &pages.display().to_string()]));
    for name in ["kvd.1", "kvd-serve.1", "kvd-namespaces-set.1", "kvd-bench-attend.1"] {
        let page = std::fs::read_to_string(pages.join(name)).expect(name);
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{name}: {page}");
    }
    let set = std::fs::read_to_string(pages.join("kvd-namespaces-set.1")).unwrap();
    assert!(set.contains("pool\\-bytes"), "{set}");
    assert_eq!(kvd(&["man-pages", "/proc/nowhere"]).status.code(), Some(64));
}
