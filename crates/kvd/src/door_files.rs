//! Files of doors: TLS and principals. They are read before the daemon takes anything, and read
//! anew when they change or SIGHUP asks for it.

use crate::access::PrincipalTable;
use crate::bounded_file::read_bytes;
use crate::config::{AccessConfig, ConfigError};
use crate::metrics::{Metric, Metrics};
use crate::service::Service;
use crate::tls::{DoorTls, TlsError, TlsFiles};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use xxhash_rust::xxh3::Xxh3;

/// Labels of reloads: what was read, and how that ended.
const FILES: [&str; 3] = ["server_tls", "admin_tls", "principals"];
const RESULTS: [&str; 2] = ["ok", "failed"];

/// Has the counters of reloads begin at 0.
pub(crate) fn describe_reloads(metrics: &Metrics) {
    for (files, result) in FILES.into_iter().flat_map(|files| RESULTS.map(|of| (files, of))) {
        let labels = [("files", files), ("result", result)];
        metrics.counter(Metric::FileReloadsTotal, &labels).increment(0);
    }
}

/// Files that were read, and found good.
pub(crate) struct DoorFiles {
    pub(crate) server_tls: Option<Arc<DoorTls>>,
    pub(crate) admin_tls: Option<Arc<DoorTls>>,
    pub(crate) principals: Option<PrincipalTable>,
}

impl DoorFiles {
    /// Reads them.
    ///
    /// # Errors
    /// The setting whose file cannot be used.
    pub(crate) fn read_files(config: &AccessConfig) -> Result<Self, ConfigError> {
        let read = |files: &Option<TlsFiles>, protocol| {
            files.clone().map(|files| DoorTls::read_files(files, protocol)).transpose()
        };
        let refused = |error: TlsError| {
            ConfigError::new(error.key, format!("{:?}: {}", error.path, error.reason))
        };
        let principals = config.principals.as_deref().map(PrincipalTable::read_file).transpose();
        Ok(Self {
            server_tls: read(&config.server_tls, b"h2").map_err(refused)?,
            admin_tls: read(&config.admin_tls, b"http/1.1").map_err(refused)?,
            principals: principals
                .map_err(|error| ConfigError::new("access.principals", error.to_string()))?,
        })
    }
}

/// Files that belong together, and what to do when they change.
struct WatchedFiles {
    /// As the label `files` of metrics has it.
    name: &'static str,
    paths: Vec<PathBuf>,
    /// The hash of what was read last.
    hash: u64,
    read: Box<dyn Fn() -> Result<(), String> + Send>,
}

/// Looks at files while the daemon serves.
pub(crate) struct FileWatch {
    service: Arc<Service>,
    watched: Vec<WatchedFiles>,
    interval: Duration,
}

impl FileWatch {
    /// Watches all files of doors.
    pub(crate) fn new(
        service: Arc<Service>,
        server_tls: Option<Arc<DoorTls>>,
        admin_tls: Option<Arc<DoorTls>>,
    ) -> Self {
        let mut watched = Vec::new();
        for (name, tls) in [("server_tls", server_tls), ("admin_tls", admin_tls)] {
            if let Some(tls) = tls {
                let paths = tls.list_paths();
                let read = move || tls.read_anew().map_err(|error| error.to_string());
                watched.push(WatchedFiles::new(name, paths, Box::new(read)));
            }
        }
        if let Some(path) = service.access_control().principals_file().map(Path::to_owned) {
            let (service, of_read) = (service.clone(), path.clone());
            let read = move || {
                let table = PrincipalTable::read_file(&of_read);
                table
                    .map(|table| service.access_control().replace_table(table))
                    .map_err(|error| error.to_string())
            };
            watched.push(WatchedFiles::new("principals", vec![path], Box::new(read)));
        }
        let interval = service.config().access.check_interval;
        Self { service, watched, interval }
    }

    /// Looks at them at every interval, and whenever it is asked to.
    pub(crate) async fn watch_files(mut self, asked: Arc<Notify>) {
        if self.watched.is_empty() {
            return;
        }
        loop {
            let is_asked = tokio::select! {
                () = tokio::time::sleep(self.interval) => false,
                () = asked.notified() => true,
            };
            // Files may lie on a network.
            let looked = tokio::task::spawn_blocking(move || {
                self.look_at_files(is_asked);
                self
            });
            match looked.await {
                Ok(watch) => self = watch,
                Err(error) => {
                    tracing::error!(%error, "the files of doors are watched no longer");
                    return;
                }
            }
        }
    }

    fn look_at_files(&mut self, is_asked: bool) {
        let (metrics, audit) = (self.service.metrics(), self.service.access_control().audit_log());
        for files in &mut self.watched {
            let hash = hash_files(&files.paths);
            if !is_asked && hash == files.hash {
                continue;
            }
            files.hash = hash;
            let outcome = (files.read)();
            let result = if outcome.is_ok() { "ok" } else { "failed" };
            let labels = [("files", files.name), ("result", result)];
            metrics.counter(Metric::FileReloadsTotal, &labels).increment(1);
            audit.log_reload(files.name, outcome.err().as_deref());
        }
    }
}

impl WatchedFiles {
    fn new(
        name: &'static str,
        paths: Vec<PathBuf>,
        read: Box<dyn Fn() -> Result<(), String> + Send>,
    ) -> Self {
        let hash = hash_files(&paths);
        Self { name, paths, hash, read }
    }
}

/// Hash of what files hold; a file that cannot be read counts as one of its own kind.
fn hash_files(paths: &[PathBuf]) -> u64 {
    let mut hash = Xxh3::new();
    for path in paths {
        match read_bytes(path) {
            Ok(bytes) => {
                hash.update(&(bytes.len() as u64).to_le_bytes());
                hash.update(&bytes);
            }
            Err(error) => hash.update(error.kind().to_string().as_bytes()),
        }
    }
    hash.digest()
}
