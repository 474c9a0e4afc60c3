//! Redis and Valkey, one server. A connection for look-ups, so that none waits behind objects, and
//! some for objects. A connection that breaks is made anew by the next request that needs it.

use crate::settings::{RemoteSettings, SettingsError};
use crate::store::{RemoteStore, StoreFailure, StoreFuture};
use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, RedisError};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Mutex;

/// Names in the first look-up of a call; the next has four times as many, up to the last.
const FIND_FIRST: usize = 16;
const FIND_MAX: usize = 1024;

type ConnectionLine = Arc<Mutex<Option<MultiplexedConnection>>>;

pub(crate) struct RedisStore {
    client: Client,
    finds: ConnectionLine,
    objects: Vec<ConnectionLine>,
    next: AtomicUsize,
    ttl: Duration,
    connect_time: Duration,
}

impl RedisStore {
    pub(crate) fn new_store(url: &str, settings: &RemoteSettings) -> Result<Self, SettingsError> {
        // Used where the address asks for TLS; a process has one.
        let _already_there = rustls::crypto::ring::default_provider().install_default();
        let refused = |error: RedisError| SettingsError::Client(error.to_string());
        let mut info = url.into_connection_info().map_err(refused)?;
        if let Some(password) = &settings.password {
            let redis = info.redis_settings().clone().set_password(password);
            info = info.set_redis_settings(redis);
        }
        Ok(Self {
            client: Client::open(info).map_err(refused)?,
            finds: ConnectionLine::default(),
            objects: (0..settings.connections).map(|_| ConnectionLine::default()).collect(),
            next: AtomicUsize::new(0),
            ttl: settings.ttl,
            connect_time: settings.timeout,
        })
    }

    fn next_line(&self) -> &ConnectionLine {
        let next = self.next.fetch_add(1, Relaxed);
        self.objects.get(next % self.objects.len().max(1)).unwrap_or(&self.finds)
    }

    /// The connection of a line. It is made by a task of its own, so that it comes to be also when
    /// whoever waits for it has to leave.
    async fn connect_line(
        &self,
        line: &ConnectionLine,
    ) -> Result<MultiplexedConnection, StoreFailure> {
        if let Ok(line) = line.try_lock()
            && let Some(connection) = &*line
        {
            return Ok(connection.clone());
        }
        let (client, line) = (self.client.clone(), Arc::clone(line));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_time))
            .set_response_timeout(None);
        let connecting = tokio::spawn(async move {
            let mut line = line.lock().await;
            if let Some(connection) = &*line {
                return Ok(connection.clone());
            }
            let made = client.get_multiplexed_async_connection_with_config(&config).await;
            made.map(|connection| line.insert(connection).clone())
        });
        let made = connecting.await.map_err(|error| StoreFailure::Failed(error.to_string()))?;
        made.map_err(|error| failure_of(&error))
    }

    /// Says what an error means; a connection that is no more is forgotten.
    async fn note_failure(&self, line: &ConnectionLine, error: &RedisError) -> StoreFailure {
        if error.is_unrecoverable_error() || error.is_io_error() {
            *line.lock().await = None;
        }
        failure_of(error)
    }
}

fn failure_of(error: &RedisError) -> StoreFailure {
    let text = error.to_string();
    // Of a pipeline the first.
    let of_server = error.clone().into_server_errors();
    let code = of_server.as_ref().and_then(|errors| Some(errors.first()?.1.code()));
    match code {
        Some("OOM" | "MISCONF") => StoreFailure::Full(text),
        Some("NOAUTH" | "WRONGPASS" | "NOPERM") => StoreFailure::Denied(text),
        _ if error.kind() == redis::ErrorKind::AuthenticationFailed => StoreFailure::Denied(text),
        _ => StoreFailure::Failed(text),
    }
}

impl RemoteStore for RedisStore {
    fn count_present<'a>(&'a self, paths: &'a [String]) -> StoreFuture<'a, usize> {
        Box::pin(async move {
            let (mut found, mut many) = (0, FIND_FIRST);
            while found < paths.len() {
                let asked = &paths[found..paths.len().min(found + many)];
                let mut pipe = redis::pipe();
                for path in asked {
                    pipe.cmd("EXISTS").arg(path);
                }
                let mut connection = self.connect_line(&self.finds).await?;
                let answer: Result<Vec<bool>, _> = pipe.query_async(&mut connection).await;
                let there = match answer {
                    Ok(there) => there.into_iter().take_while(|is_there| *is_there).count(),
                    Err(error) => return Err(self.note_failure(&self.finds, &error).await),
                };
                found += there;
                if there < asked.len() {
                    break;
                }
                many = (4 * many).min(FIND_MAX);
            }
            Ok(found)
        })
    }

    fn read_object<'a>(&'a self, path: &'a str, bytes_max: u64) -> StoreFuture<'a, Option<Bytes>> {
        Box::pin(async move {
            let line = self.next_line();
            let mut connection = self.connect_line(line).await?;
            // GET, were it not for values that somebody has made too large.
            let mut get = redis::cmd("GETRANGE");
            get.arg(path).arg(0).arg(bytes_max);
            let answer: Result<Vec<u8>, _> = get.query_async(&mut connection).await;
            match answer {
                // No object is empty.
                Ok(bytes) => Ok((!bytes.is_empty()).then(|| bytes.into())),
                Err(error) => Err(self.note_failure(line, &error).await),
            }
        })
    }

    fn write_object<'a>(&'a self, path: &'a str, bytes: Bytes) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let line = self.next_line();
            let mut connection = self.connect_line(line).await?;
            let mut set = redis::cmd("SET");
            set.arg(path).arg(&bytes[..]);
            if !self.ttl.is_zero() {
                set.arg("EX").arg(self.ttl.as_secs().max(1));
            }
            let answer: Result<(), _> = set.query_async(&mut connection).await;
            match answer {
                Ok(()) => Ok(()),
                Err(error) => Err(self.note_failure(line, &error).await),
            }
        })
    }

    fn remove_object<'a>(&'a self, path: &'a str) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let mut connection = self.connect_line(&self.finds).await?;
            let mut unlink = redis::cmd("UNLINK");
            let answer: Result<u64, _> = unlink.arg(path).query_async(&mut connection).await;
            match answer {
                Ok(_) => Ok(()),
                Err(error) => Err(self.note_failure(&self.finds, &error).await),
            }
        })
    }
}
