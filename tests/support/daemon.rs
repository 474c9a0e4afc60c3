//! A daemon in this process, on ports of its own, and how to reach it.

use crate::engine::engine;
use crate::rows::ModelShape;
use crate::{TestRng, assert_within_budget};
use kvd::config::ConfigOverrides;
use kvd::service::CallContext;
use kvd::{Config, DrainOutcome, RunningDaemon};
use kvd_client::{Client, ClientOptions, Endpoint, Namespace, PoolStats};
use kvd_proto::v1::kvd_client::KvdClient;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::transport::Channel;

/// A daemon to be.
#[derive(Clone, Debug)]
pub struct DaemonPlan {
    flags: Vec<(String, String)>,
}

/// A daemon of 64 MiB on free loopback ports, which takes pages of any size; two compute threads,
/// defaults otherwise.
#[must_use]
pub fn daemon() -> DaemonPlan {
    let plan = DaemonPlan { flags: Vec::new() };
    plan.with_setting("server.listen_tcp", "127.0.0.1:0")
        .with_setting("admin.listen", "127.0.0.1:0")
        .with_setting("device.pool_bytes", "64 MiB")
        .with_setting("device.threads", "2")
        .with_setting("limits.page_tokens_min", "1")
}

impl DaemonPlan {
    /// With a setting, as `--set` would give it.
    #[must_use]
    pub fn with_setting(mut self, key: &str, value: &str) -> Self {
        self.flags.push((key.to_owned(), value.to_owned()));
        self
    }

    /// With this much page memory.
    #[must_use]
    pub fn with_pool(self, size: &str) -> Self {
        self.with_setting("device.pool_bytes", size)
    }

    /// With this much room in a message, and so in a calibration.
    #[must_use]
    pub fn with_messages(self, size: &str) -> Self {
        self.with_setting("server.message_bytes_max", size)
            .with_setting("limits.calibration_bytes_max", size)
    }

    /// With a Unix socket besides.
    #[must_use]
    pub fn with_unix(self, path: &Path) -> Self {
        self.with_setting("server.listen_unix", &path.display().to_string())
    }

    /// Starts it.
    ///
    /// # Panics
    /// When it cannot start.
    pub async fn start(self) -> TestDaemon {
        let overrides = ConfigOverrides { file: None, environment: false, flags: self.flags };
        let config = Config::load(&overrides).expect("a valid configuration");
        let daemon = kvd::Daemon::build(config).await.expect("sockets and memory");
        TestDaemon { running: daemon.spawn() }
    }
}

/// A serving daemon.
pub struct TestDaemon {
    running: RunningDaemon,
}

impl TestDaemon {
    /// Where it is reached over TCP.
    ///
    /// # Panics
    /// Never: it always listens there.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        let address = self.running.bound_addresses().tcp.expect("a TCP listener");
        format!("http://{address}").parse().expect("an endpoint")
    }

    /// A connection of its own.
    ///
    /// # Panics
    /// When the daemon is not there.
    pub async fn client(&self) -> Client {
        self.client_with(ClientOptions::default()).await
    }

    /// A connection with other limits.
    ///
    /// # Panics
    /// When the daemon is not there.
    pub async fn client_with(&self, options: ClientOptions) -> Client {
        Client::connect_with(self.endpoint(), &options).await.expect("connect")
    }

    /// A connection of a tenant.
    ///
    /// # Panics
    /// When the daemon is not there.
    pub async fn client_of(&self, namespace: &str) -> Client {
        let namespace = Namespace::new(namespace).expect("a namespace");
        self.client().await.with_namespace(&namespace)
    }

    /// A bare channel, for generated clients.
    ///
    /// # Panics
    /// When the daemon is not there.
    pub async fn channel(&self) -> Channel {
        let endpoint = tonic::transport::Endpoint::try_from(self.endpoint().to_string());
        endpoint.expect("a URI").connect().await.expect("connect")
    }

    /// The generated client, which sends what no typed client would.
    ///
    /// # Panics
    /// When the daemon is not there.
    pub async fn raw_client(&self) -> KvdClient<Channel> {
        KvdClient::new(self.channel().await)
    }

    /// From now on new work is refused; sockets stay open.
    pub fn stop_admitting(&self) {
        self.running.service().drain();
    }

    /// Keeps the device from all others until the answer is dropped.
    ///
    /// # Panics
    /// When the device takes no job.
    pub async fn hold_device(&self) -> SyncSender<()> {
        let (release, released) = sync_channel(1);
        let (begin, begun) = tokio::sync::oneshot::channel();
        let worker = self.running.service().first_worker().clone();
        let call = CallContext::new(Namespace::new("default").expect("a namespace"));
        tokio::spawn(async move {
            let run = worker.run_closure(&call, move |_| {
                let _ = begin.send(());
                let _: Result<(), _> = released.recv();
                Ok(())
            });
            run.await
        });
        begun.await.expect("the device takes the job");
        release
    }

    /// Jobs that wait for the device.
    #[must_use]
    pub fn queued_jobs(&self) -> usize {
        self.running.service().first_worker().queued_jobs()
    }

    /// Stops it, as SIGTERM does.
    pub async fn stop_daemon(self) -> DrainOutcome {
        self.running.drain().await
    }

    /// Use of the page memory.
    ///
    /// # Panics
    /// When the daemon does not answer.
    pub async fn pool_stats(&self) -> PoolStats {
        let stats = self.client().await.stats().await.expect("stats");
        stats.pools.into_iter().next().expect("one tier")
    }

    /// Whether no page memory is in use. That of a long sequence is free soon after it is closed.
    pub async fn is_empty(&self) -> bool {
        for _ in 0..1000 {
            let pool = self.pool_stats().await;
            if (pool.used_bytes, pool.slots) == (0, 0) {
                return true;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        false
    }

    /// Proof of good health: a new engine stores, asks, gets the right answer, and leaves.
    ///
    /// # Panics
    /// When any of it fails.
    pub async fn assert_serves(&self) {
        let engine =
            engine(self).with_name("proof").register_model(ModelShape::small_shape(), "raw").await;
        let mut rng = TestRng::new(77);
        let mut conversation = engine.open_sequence().await;
        engine.grow_sequence(&mut conversation, 20, &mut rng).await;
        let question = engine.random_question(&conversation, 2, &mut rng);
        let answer = engine.ask_question(&question).await;
        let rows = [&conversation.layers[0]];
        assert_within_budget("proof of health", &engine, &question, &answer, &rows);
        engine.close_sequence(conversation).await;
        engine.client.unregister_model(engine.model).await.expect("unregister");
    }

    /// Status and body of a page of the admin port.
    ///
    /// # Panics
    /// When the port does not speak HTTP.
    pub async fn admin_page(&self, path: &str) -> (u16, String) {
        let address = self.running.admin_address().expect("an admin port");
        http_page(address, path).await
    }
}

/// Status and body of `GET path`.
///
/// # Panics
/// When `address` does not speak HTTP.
pub async fn http_page(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("connect to the admin port");
    let request = format!("GET {path} HTTP/1.1\r\nHost: kvd\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("ask the admin port");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("read the admin port");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    assert!(!head.to_lowercase().contains("chunked"), "the body is sent whole: {head}");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    (status.expect("a status"), body.to_owned())
}
