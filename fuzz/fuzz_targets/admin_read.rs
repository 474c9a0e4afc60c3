//! Bytes as what a peer sends to the admin port: it is answered or closed, without a fault of the
//! daemon, without its figures where no token is shown, and never held.
#![no_main]

use kvd::admin::AdminPages;
use kvd::config::ConfigOverrides;
use kvd::{Config, Daemon};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::runtime::{Builder, Runtime};

/// Whom the daemon knows, by the hash of [`TOKEN`].
const PRINCIPALS: &str = r#"
[[principals]]
name = "reader"
namespaces = ["*"]
roles = ["use", "operate", "read_metrics"]
tokens = ["sha256:488e9be7bd84f930a1cf58aad065ad12d4934fbb4e8b3131704a9ae75fb39f57"]
"#;
const TOKEN: &[u8] = b"kvd_of_the_fuzzer";
/// Words of the figures.
const FIGURES: [&[u8]; 2] = [b"kvd_build_info", b"\"boot_id\""];

/// Longest that a peer who says no more is kept, on the runtime's clock: it stands while the daemon
/// works, and jumps on when all wait.
const PATIENCE: Duration = Duration::from_secs(60);
const PIPE_BYTES: usize = 1 << 16;

struct ServedPages {
    runtime: Runtime,
    pages: AdminPages,
}

static SERVED: LazyLock<ServedPages> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let principals =
        std::env::temp_dir().join(format!("kvd-fuzz-{}-principals.toml", std::process::id()));
    std::fs::write(&principals, PRINCIPALS).expect("a temporary folder");
    let flags = [
        ("server.listen_tcp", "127.0.0.1:0"),
        ("admin.listen", ""),
        ("admin.metrics", "role"),
        ("access.principals", principals.to_str().expect("a path of UTF-8")),
        ("device.pool_bytes", "1 MiB"),
        ("device.threads", "1"),
    ];
    let flags = flags.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    let config = Config::load(&ConfigOverrides { file: None, environment: false, flags });
    let daemon = runtime.block_on(Daemon::build(config.expect("a configuration")));
    // It lasts as long as the process.
    let daemon: &Daemon = Box::leak(Box::new(daemon.expect("a daemon")));
    std::fs::remove_file(&principals).expect("it was read");
    ServedPages { runtime, pages: daemon.admin_pages() }
});

/// Sends all, leaves or falls silent, and reads what comes until the daemon closes.
async fn exchange_bytes(mut stream: DuplexStream, sent: &[u8], leaves: bool) -> Vec<u8> {
    let mut answer = Vec::new();
    let (mut reads, mut writes) = tokio::io::split(&mut stream);
    let send = async {
        // The daemon may close before it has read all.
        if writes.write_all(sent).await.is_ok() && leaves {
            let _ = writes.shutdown().await;
        }
    };
    let (_, read) = tokio::join!(send, reads.read_to_end(&mut answer));
    read.expect("a pipe breaks in no other way than its end");
    answer
}

fn has_word(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|window| window == word)
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, sent)) = data.split_first() else { return };
    let served = &*SERVED;
    let (stream, of_daemon) = duplex(PIPE_BYTES);
    let leaves = kind % 2 == 1;
    let both = async {
        tokio::join!(exchange_bytes(stream, sent, leaves), served.pages.serve_stream(of_daemon))
    };
    let bounded = served.runtime.block_on(async { tokio::time::timeout(PATIENCE, both).await });
    let (answer, ()) = bounded.expect("a peer is held");
    if answer.is_empty() {
        return;
    }
    let status = answer.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5));
    let status = status.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    let status: u16 = status.expect("an answer begins with its status");
    assert!((100..500).contains(&status), "{status} to {:?}", String::from_utf8_lossy(sent));
    if !has_word(sent, TOKEN) {
        let told = FIGURES.iter().find(|word| has_word(&answer, word));
        assert!(told.is_none(), "figures without a token: {:?}", String::from_utf8_lossy(sent));
    }
});
