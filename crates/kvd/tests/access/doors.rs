//! TLS of TCP and of the admin port: who is cut off in the handshake, and who is known by what.

use super::certificates::{Authority, Signed, Validity};
use super::support::start;
use super::{principal, token};
use kvd::config::ConfigOverrides;
use kvd::{BuildError, Config, Daemon, RunningDaemon};
use kvd_client::{
    BearerToken, Client, ClientError, ClientOptions, Endpoint, ErrorCode, Namespace, TlsOptions,
};
use std::path::Path;
use tempfile::TempDir;

/// Files of a door in a folder.
struct DoorFolder {
    folder: TempDir,
    authority: Authority,
}

impl DoorFolder {
    fn new() -> Self {
        let (folder, authority) = (tempfile::tempdir().unwrap(), Authority::new());
        authority.sign(&["dns:localhost"], Validity::Current).write_server(folder.path());
        std::fs::write(folder.path().join("ca.pem"), &authority.pem).unwrap();
        Self { folder, authority }
    }

    fn text(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Settings of TLS of a section.
    fn flags(&self, section: &str) -> Vec<(String, String)> {
        [("tls_certificate", "server.pem"), ("tls_key", "server.key"), ("tls_client_ca", "ca.pem")]
            .map(|(key, file)| (format!("{section}.{key}"), self.text(file)))
            .to_vec()
    }

    async fn start(&self, further: &[(&str, &str)]) -> RunningDaemon {
        let flags = self.flags("server");
        let flags = flags.iter().map(|(key, value)| (&key[..], &value[..]));
        start(&flags.chain(further.iter().copied()).collect::<Vec<_>>()).await
    }
}

/// A client of the name that the certificate has.
async fn connect(running: &RunningDaemon, options: ClientOptions) -> Result<Client, ClientError> {
    let port = running.bound_addresses().tcp.unwrap().port();
    let endpoint: Endpoint = format!("https://localhost:{port}").parse().unwrap();
    Client::connect_with(endpoint, &options).await
}

/// Connects and asks: TLS 1.3 tells a client of a refused certificate only when it reads.
async fn list_models_with(
    running: &RunningDaemon,
    options: ClientOptions,
) -> Result<(), ClientError> {
    let client = connect(running, options).await?;
    let client = client.with_namespace(&Namespace::new("default").unwrap());
    client.list_models().await.map(drop)
}

fn with(tls: TlsOptions) -> ClientOptions {
    ClientOptions::default().with_tls(tls)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_certificates_of_the_authority_that_have_not_expired_come_in() {
    let door = DoorFolder::new();
    let running = door.start(&[]).await;
    let (own, other) = (&door.authority, Authority::new());
    let names = &["uri:spiffe://test/engine"];
    let good = own.sign(names, Validity::Current);
    list_models_with(&running, with(own.client_tls(Some(&good)))).await.unwrap();
    let expired = own.sign(names, Validity::Expired);
    let foreign = other.sign(names, Validity::Current);
    for shown in [None, Some(&expired), Some(&foreign)] {
        let error = list_models_with(&running, with(own.client_tls(shown))).await.unwrap_err();
        assert_eq!(error.code, None, "no rpc was reached: {error}");
    }
    // A client checks the daemon as well: its authority, and its name.
    let distrustful = TlsOptions::default().with_ca(other.pem.as_bytes());
    assert!(connect(&running, with(distrustful)).await.is_err());
    let misnamed = own.client_tls(Some(&good)).with_server_name("elsewhere");
    assert!(connect(&running, with(misnamed)).await.is_err());
    // Plain HTTP/2 at a door of TLS.
    let plain = format!("http://{}", running.bound_addresses().tcp.unwrap());
    assert!(match Client::connect(plain.parse().unwrap()).await {
        Ok(client) => client.list_models().await.is_err(),
        Err(_) => true,
    });
    running.drain().await;
}

/// Principals by certificate and by token.
fn principals() -> String {
    principal("by-token", &["default"], &["use"])
        + "[[principals]]\nname = \"by-certificate\"\nnamespaces = [\"default\"]\n\
           roles = [\"use\"]\ncertificates = [\"uri:spiffe://test/engine\", \"dns:engine.test\"]\n"
        + "[[principals]]\nname = \"elsewhere\"\nnamespaces = [\"other\"]\nroles = [\"use\"]\n\
           certificates = [\"dns:other.test\"]\n"
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn principals_are_known_by_alternative_names_and_by_tokens_over_tls() {
    let door = DoorFolder::new();
    let file = door.text("principals.toml");
    std::fs::write(&file, principals()).unwrap();
    let flags = [("access.principals", &file[..]), ("server.tls_client_required", "false")];
    let running = door.start(&flags).await;
    let sign = |name: &str| door.authority.sign(&[name], Validity::Current);
    let showing = |signed: &Signed| with(door.authority.client_tls(Some(signed)));
    for name in ["uri:spiffe://test/engine", "dns:engine.test"] {
        list_models_with(&running, showing(&sign(name))).await.unwrap();
    }
    let code = |answer: Result<(), ClientError>| answer.unwrap_err().code;
    let unknown = list_models_with(&running, showing(&sign("dns:stranger.test"))).await;
    assert_eq!(code(unknown), Some(ErrorCode::Unauthenticated));
    let other = list_models_with(&running, showing(&sign("dns:other.test"))).await;
    assert_eq!(code(other), Some(ErrorCode::NamespaceDenied));
    let plain = || with(door.authority.client_tls(None));
    let bearer = |text| BearerToken::new(text).unwrap();
    list_models_with(&running, plain().with_token(bearer(token("by-token")))).await.unwrap();
    assert_eq!(code(list_models_with(&running, plain()).await), Some(ErrorCode::Unauthenticated));
    // A wrong token is refused, also beside a certificate that would do.
    let both = showing(&sign("dns:engine.test")).with_token(bearer("wrong"));
    assert_eq!(code(list_models_with(&running, both).await), Some(ErrorCode::Unauthenticated));
    running.drain().await;
}

/// Builds a daemon over these settings, which must not do; says why.
async fn refusal(flags: &[(String, String)]) -> String {
    let basic = [("server.listen_tcp", "127.0.0.1:0"), ("admin.listen", "")];
    let basic = basic.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let flags = basic.iter().chain(flags).cloned().collect();
    match Config::load(&ConfigOverrides { file: None, environment: false, flags }) {
        Err(error) => error.to_string(),
        Ok(config) => match Daemon::build(config).await {
            Err(error @ BuildError::Config(_)) => error.to_string(),
            Err(error) => panic!("not of the configuration: {error}"),
            Ok(_) => panic!("it was built"),
        },
    }
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_cannot_serve_end_the_start_with_their_setting() {
    let door = DoorFolder::new();
    let path = |name: &str| door.folder.path().join(name);
    let good = door.flags("server");
    let set = |key: &str, value: &str| vec![(key.to_owned(), value.to_owned())];
    write(&path("empty.pem"), "");
    let foreign = Authority::new().sign(&["dns:localhost"], Validity::Current);
    write(&path("foreign.key"), &foreign.key);
    write(&path("none.toml"), "principals = []");
    write(&path("empty.toml"), "# Nobody yet.\n");
    write(&path("bare.toml"), "[[principals]]\nname = \"x\"\nnamespaces = [\"a\"]\nroles = []\n");
    write(&path("typo.toml"), "[[principals]]\nname = \"x\"\nnamespace = [\"a\"]\n");
    let with = |key, file: &str| [good.clone(), set(key, &door.text(file))].concat();
    for (flags, parts) in [
        (with("server.tls_certificate", "missing.pem"), ["server.tls_certificate", "missing.pem"]),
        (with("server.tls_certificate", "empty.pem"), ["server.tls_certificate", "PEM"]),
        (with("server.tls_key", "foreign.key"), ["server.tls_certificate", "server.tls_key"]),
        (with("server.tls_client_ca", "empty.pem"), ["server.tls_client_ca", "PEM"]),
        (good[..1].to_vec(), ["server.tls_key", "is missing"]),
        (set("access.principals", &door.text("none.toml")), ["access.principals", "nobody"]),
        (set("access.principals", &door.text("empty.toml")), ["empty.toml", "nobody could use"]),
        (set("access.principals", &door.text("bare.toml")), ["\"x\"", "roles"]),
        (set("access.principals", &door.text("typo.toml")), ["typo.toml", "namespace"]),
        (set("admin.metrics", "role"), ["admin.metrics", "access.principals"]),
        (set("server.listen_tcp", "0.0.0.0:0"), ["server.listen_tcp", "server.insecure = true"]),
        (set("admin.listen", "0.0.0.0:0"), ["admin.listen", "server.insecure = true"]),
        (set("admin.listen", "[::]:0"), ["admin.listen", "access.principals"]),
    ] {
        let said = refusal(&flags).await;
        assert!(parts.iter().all(|part| said.contains(part)), "{flags:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_the_loopback_is_served_with_authentication_or_said_to_be_insecure() {
    let gauge = |running: &RunningDaemon| {
        let page = running.service().metrics().render_page();
        page.lines().find_map(|line| line.strip_prefix("kvd_insecure ").map(str::to_owned))
    };
    let open = [("server.listen_tcp", "0.0.0.0:0"), ("admin.listen", "0.0.0.0:0")];
    let running = start(&[&open[..], &[("server.insecure", "true")]].concat()).await;
    super::support::until(|| gauge(&running).is_some_and(|value| value == "1")).await;
    running.drain().await;
    let door = DoorFolder::new();
    let running = door.start(&open).await;
    super::support::until(|| gauge(&running).is_some_and(|value| value == "0")).await;
    running.drain().await;
    // Principals are asked at the web page, and at /metrics if that is said.
    let file = door.text("principals.toml");
    write(Path::new(&file), &principals());
    let named = [("access.principals", &file[..]), open[1]];
    start(&named).await.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_port_speaks_tls_and_metrics_need_their_role() {
    let door = DoorFolder::new();
    let file = door.text("principals.toml");
    let watcher = principal("watcher", &["*"], &["read_metrics"]);
    write(Path::new(&file), &(watcher + &principal("engine", &["default"], &["use"])));
    let mut flags = door.flags("admin");
    for (key, value) in
        [("admin.listen", "127.0.0.1:0"), ("access.principals", &file), ("admin.metrics", "role")]
    {
        flags.push((key.to_owned(), value.to_owned()));
    }
    let flags: Vec<_> = flags.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    let running = start(&flags).await;
    let address = running.admin_address().unwrap();
    let get = |path: &'static str, token: Option<&'static str>| {
        let authority = door.authority.pem.clone();
        tokio::task::spawn_blocking(move || https_get(address, &authority, path, token))
    };
    let page = get("/metrics", Some(token("watcher"))).await.unwrap();
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("kvd_ready 1"), "{page}");
    for (path, token, status) in [
        ("/healthz", None, "200"),
        ("/readyz", None, "200"),
        ("/metrics", None, "401"),
        ("/metrics", Some("wrong"), "401"),
        ("/metrics", Some("engine"), "403"),
    ] {
        let page = get(path, token).await.unwrap();
        assert!(page.starts_with(&format!("HTTP/1.1 {status}")), "{path} {token:?}: {page}");
    }
    running.drain().await;
}

/// An answer over TLS, of a client of the plainest kind.
fn https_get(
    address: std::net::SocketAddr,
    authority: &str,
    path: &str,
    token: Option<&str>,
) -> String {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, ServerName};
    use std::io::{Read, Write};
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let session = rustls::ClientConnection::new(config.into(), name).unwrap();
    let socket = std::net::TcpStream::connect(address).unwrap();
    let mut stream = rustls::StreamOwned::new(session, socket);
    let shown = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    let shown = shown.unwrap_or_default();
    let head = format!("GET {path} HTTP/1.1\r\nHost: kvd\r\nConnection: close\r\n{shown}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut page = Vec::new();
    // The daemon may close without a farewell of TLS.
    let _ = stream.read_to_end(&mut page);
    String::from_utf8_lossy(&page).into_owned()
}
