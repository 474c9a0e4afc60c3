//! Certificates that change under load: no call fails, new connections see the new one, and a bad
//! one changes nothing.

use super::certificates::{Authority, Validity};
use super::support::{start, until};
use kvd::RunningDaemon;
use kvd_client::{Client, ClientOptions, Endpoint, TlsOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

async fn connect(endpoint: &Endpoint, tls: &TlsOptions) -> Client {
    let options = ClientOptions::default().with_tls(tls.clone());
    Client::connect_with(endpoint.clone(), &options).await.unwrap()
}

/// The value of a line of the page of metrics.
fn reloads(running: &RunningDaemon, result: &str) -> u64 {
    let line = format!("kvd_file_reloads_total{{files=\"server_tls\",result=\"{result}\"}} ");
    let page = running.service().metrics().render_page();
    page.lines().find_map(|text| text.strip_prefix(&line)).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn certificates_are_swapped_under_load_without_a_failed_call() {
    let (first, second) = (Authority::new(), Authority::new());
    let folder = tempfile::tempdir().unwrap();
    let sign = |of: &Authority| of.sign(&["dns:localhost"], Validity::Current);
    sign(&first).write_server(folder.path());
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (certificate, key) = (path("server.pem"), path("server.key"));
    // By looking alone: nobody sends a signal.
    let running = start(&[
        ("server.tls_certificate", &certificate),
        ("server.tls_key", &key),
        ("access.check_files_ms", "20"),
    ])
    .await;
    // Clients that trust both, as those of a fleet in the middle of a change do.
    let tls = TlsOptions::default().with_ca(format!("{}{}", first.pem, second.pem));
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let port = running.bound_addresses().tcp.unwrap().port();
    let endpoint: Endpoint = format!("https://localhost:{port}").parse().unwrap();
    let mut load = Vec::new();
    for stays in [true, true, false, false] {
        let (stop, calls, endpoint, tls) =
            (stop.clone(), calls.clone(), endpoint.clone(), tls.clone());
        load.push(tokio::spawn(async move {
            let mut client = connect(&endpoint, &tls).await;
            while !stop.load(Ordering::Relaxed) {
                if !stays {
                    client = connect(&endpoint, &tls).await;
                }
                client.server_info().await.expect("no call fails");
                calls.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    for turn in 1..=5 {
        let before = (reloads(&running, "ok"), calls.load(Ordering::Relaxed));
        // Key and certificate change one after the other: between them they do not fit, and what
        // was read before serves on.
        sign(if turn % 2 == 1 { &second } else { &first }).write_server(folder.path());
        until(|| reloads(&running, "ok") > before.0).await;
        until(|| calls.load(Ordering::Relaxed) > before.1 + 50).await;
    }
    // The fifth was of the second authority: a client that trusts the first alone is turned away.
    let trusting = |authority: &Authority| {
        ClientOptions::default().with_tls(TlsOptions::default().with_ca(authority.pem.as_bytes()))
    };
    assert!(Client::connect_with(endpoint.clone(), &trusting(&first)).await.is_err());
    Client::connect_with(endpoint.clone(), &trusting(&second)).await.unwrap();
    // A bad one keeps what was there, and is counted.
    let failed = reloads(&running, "failed");
    std::fs::write(folder.path().join("server.pem"), "not a certificate").unwrap();
    until(|| reloads(&running, "failed") > failed).await;
    Client::connect_with(endpoint, &trusting(&second)).await.unwrap();
    stop.store(true, Ordering::Relaxed);
    for task in load {
        task.await.expect("a call failed");
    }
    assert!(calls.load(Ordering::Relaxed) > 250);
    running.drain().await;
}
