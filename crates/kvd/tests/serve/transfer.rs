//! `kvd cache export` and `import`, between two daemons' folders.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use super::disk::{
    PUBLISHED, calibration, matched, publish_durably, read, register, settings, start,
};
use super::process::{Process, kvd, output};
use std::fs;
use std::path::{Path, PathBuf};

/// Runs `kvd cache`: its exit code, and all that it says.
fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = kvd();
    command.arg("cache").args(arguments);
    let done = output(command);
    let said = [done.stdout, done.stderr].concat();
    (done.status.code(), String::from_utf8(said).unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn end(daemon: Process) {
    daemon.signal("TERM");
    assert_eq!(daemon.wait().code, Some(0));
}

/// The exported file of a scope.
fn scope_file(exported: &Path) -> PathBuf {
    let files = fs::read_dir(exported).unwrap().map(|entry| entry.unwrap().path());
    files.into_iter().find(|path| !path.ends_with("descriptions.kvdr")).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_daemon_exports_another_reads_bit_by_bit() {
    for codec in ["kivi-4", "kvcomp", "kvd-2"] {
        let [ours, theirs, exported] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let calibration = calibration(codec);
        let daemon = start(ours.path(), &[]);
        let client = daemon.client().await;
        let model = register(&client, codec, &calibration).await;
        let mut expected = Vec::new();
        for of in 1..=2 {
            publish_durably(&client, model, of).await;
            expected.push(read(&client, model, of).await);
        }
        let (from, to) = (text(ours.path()), text(exported.path()));
        let (code, said) = run(&["export", from, to]);
        assert!(code == Some(69) && said.contains("another process uses"), "{code:?} {said}");
        let (code, said) = run(&["export", "--read-only", from, to]);
        assert!(code == Some(0) && said.contains("9 records"), "{code:?} {said}");
        end(daemon);
        let (code, said) = run(&["export", from, to]);
        assert!(code == Some(0) && said.contains("9 records"), "{code:?} {said}");

        let into = text(theirs.path());
        let (code, said) = run(&["import", into, to]);
        assert!(code == Some(0) && said.contains("9 records"), "{code:?} {said}");
        let (code, said) = run(&["import", "--json", into, to]);
        assert!(code == Some(0) && said.contains("\"existed\": 9"), "{code:?} {said}");
        let (code, said) = run(&["verify", into]);
        assert_eq!(code, Some(0), "{said}");
        let daemon = start(theirs.path(), &[]);
        let client = daemon.client().await;
        let model = register(&client, codec, &calibration).await;
        for (of, expected) in (1..).zip(&expected) {
            assert_eq!(matched(&client, model, of).await, [PUBLISHED, 0]);
            assert!(read(&client, model, of).await == *expected, "{codec} {of}");
        }
        // Of another codec nothing is found.
        let other = register_other(&client, codec).await;
        assert_eq!(matched(&client, other, 1).await, [0, 0]);
    }
}

async fn register_other(client: &kvd_client::Client, codec: &str) -> kvd_client::ModelId {
    let mut spec = super::cache::spec("other", if codec == "kivi-4" { "kivi-2" } else { "kivi-4" });
    spec.calibration = Vec::new().into();
    let identity = super::disk::identity("a@1");
    client.register_identified(spec, identity).await.expect("register").model
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_wrong_are_refused_whole_and_damaged_blocks_left_out() {
    let [ours, exported] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let daemon = start(ours.path(), &[]);
    let client = daemon.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    publish_durably(&client, model, 1).await;
    end(daemon);
    let to = text(exported.path());
    assert_eq!(run(&["export", text(ours.path()), to]).0, Some(0));
    let file = scope_file(exported.path());
    let sound = fs::read(&file).unwrap();
    let import = |arguments: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let done = run(&[&["import", text(folder.path()), to], arguments].concat());
        (folder, done)
    };
    for (bytes, why) in [
        (sound[..sound.len() - 1].to_vec(), "cut off"),
        (vec![0; 8192], "record 0"),
        ([&sound[..], b"and more"].concat(), "cut off"),
    ] {
        fs::write(&file, bytes).unwrap();
        let (folder, (code, said)) = import(&[]);
        assert!(code == Some(1) && said.contains(why), "{code:?} {said}");
        assert!(said.contains("nothing was imported"), "{said}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "not even a store");
    }
    fs::write(&file, &sound).unwrap();
    let wrong = ["--scope", "00112233445566778899aabbccddeeff"];
    let (_, (code, said)) = import(&wrong);
    assert!(code == Some(1) && said.contains("it is of scope"), "{code:?} {said}");
    let (_, (code, said)) = import(&["--scope", "12"]);
    assert!(code == Some(64) && said.contains("32 hexadecimal digits"), "{code:?} {said}");

    // A bit of the third of four blocks.
    let mut damaged = sound.clone();
    damaged[sound.len() / 2 + 3000] ^= 1;
    fs::write(&file, damaged).unwrap();
    let (folder, (code, said)) = import(&[]);
    assert!(code == Some(1) && said.contains("2 are damaged"), "{code:?} {said}");
    assert_eq!(run(&["verify", text(folder.path())]).0, Some(0), "no half of a block");
    let flags = settings(folder.path());
    let daemon = Process::start(&flags.iter().map(String::as_str).collect::<Vec<_>>());
    let client = daemon.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    assert_eq!(matched(&client, model, 1).await, [PUBLISHED / 2, 0]);
}
