//! Settings of the tier, each limit with its name. Pure.

use crate::name::MacKey;
use crate::tier::OnRequest;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Where the store is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteUrl {
    /// `redis://HOST:PORT/DB`, or `rediss://` with TLS.
    Redis(String),
    /// `s3://BUCKET`.
    S3 {
        /// The bucket.
        bucket: String,
    },
    /// `file:///FOLDER`, of a file system that daemons share.
    Folder(PathBuf),
}

/// A setting that is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// No such kind of store.
    #[error("{0:?} is not redis://, rediss://, s3://BUCKET or file:///FOLDER")]
    Url(String),
    /// A password would be seen by whoever sees settings.
    #[error("a password in the address would be shown with the settings: put it in a file")]
    PasswordInUrl,
    /// This build has no client for it.
    #[error("this build of kvd has no client for {0}: build it with the cargo feature {1}")]
    NotBuilt(&'static str, &'static str),
    /// A limit of 0.
    #[error("{0} must not be 0")]
    Zero(&'static str),
    /// The client refuses the rest.
    #[error("{0}")]
    Client(String),
}

impl RemoteUrl {
    /// Reads an address.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn parse_url(text: &str) -> Result<Self, SettingsError> {
        let unknown = || SettingsError::Url(text.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(unknown)?;
        match scheme {
            "redis" | "rediss" => {
                let authority = rest.split('/').next().unwrap_or_default();
                if authority.is_empty() {
                    return Err(unknown());
                }
                match authority.rsplit_once('@') {
                    Some((user, _)) if user.contains(':') => Err(SettingsError::PasswordInUrl),
                    _ => Ok(Self::Redis(text.to_owned())),
                }
            }
            "s3" => {
                let bucket = rest.trim_end_matches('/');
                let is_bucket = !bucket.is_empty() && !bucket.contains(['/', '@', ':']);
                let bucket = bucket.to_owned();
                if is_bucket { Ok(Self::S3 { bucket }) } else { Err(unknown()) }
            }
            "file" if rest.starts_with('/') => Ok(Self::Folder(PathBuf::from(rest))),
            _ => Err(unknown()),
        }
    }

    /// Whether this build has a client for it.
    ///
    /// # Errors
    /// [`SettingsError::NotBuilt`], with the cargo feature that has one.
    pub fn check_client(&self) -> Result<(), SettingsError> {
        let (is_built, scheme, feature) = match self {
            Self::Redis(_) => (cfg!(feature = "redis"), "redis://", "remote-redis"),
            Self::S3 { .. } => (cfg!(feature = "s3"), "s3://", "remote-s3"),
            Self::Folder(_) => (cfg!(feature = "objects"), "file://", "remote-objects"),
        };
        is_built.then_some(()).ok_or(SettingsError::NotBuilt(scheme, feature))
    }
}

/// Settings of a [`RemoteTier`](crate::RemoteTier). [`RemoteSettings::new`] gives the defaults.
#[derive(Clone)]
pub struct RemoteSettings {
    /// The store.
    pub url: RemoteUrl,
    /// Address of an S3-compatible server; empty for AWS's own.
    pub endpoint: String,
    /// Region of the bucket; empty: what the environment says.
    pub region: String,
    /// The beginning of all names.
    pub prefix: String,
    /// Password of a Redis, from a file.
    pub password: Option<String>,
    /// Objects that are written at a time, and connections to a Redis beside that of look-ups.
    pub connections: usize,
    /// Objects that are read at a time.
    pub reads_max: usize,
    /// Look-ups under way at a time; of more, none is made.
    pub finds_max: usize,
    /// Bytes of objects that wait to be written.
    pub queue_bytes: u64,
    /// Bytes of one object that is read.
    pub object_bytes_max: u64,
    /// Deadline of a request that moves an object.
    pub timeout: Duration,
    /// Deadline of a look-up.
    pub find_timeout: Duration,
    /// A block that was not there is not asked for again for this long.
    pub miss_time: Duration,
    /// Such blocks that are remembered.
    pub misses_max: usize,
    /// A Redis forgets objects after so long; zero: never by itself.
    pub ttl: Duration,
    /// Secret of the keyed hash.
    pub mac: Option<MacKey>,
    /// Told of each request.
    pub on_request: Option<OnRequest>,
}

impl fmt::Debug for RemoteSettings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Neither password nor secret.
        write!(out, "RemoteSettings({:?}, {})", self.url, self.prefix)
    }
}

impl RemoteSettings {
    /// The defaults.
    #[must_use]
    pub fn new(url: RemoteUrl) -> Self {
        Self {
            url,
            endpoint: String::new(),
            region: String::new(),
            prefix: "kvd".to_owned(),
            password: None,
            connections: 4,
            reads_max: 16,
            finds_max: 64,
            queue_bytes: 256 << 20,
            object_bytes_max: 256 << 20,
            timeout: Duration::from_secs(2),
            find_timeout: Duration::from_millis(50),
            miss_time: Duration::from_secs(5),
            misses_max: 65_536,
            ttl: Duration::ZERO,
            mac: None,
            on_request: None,
        }
    }

    /// # Errors
    /// [`SettingsError::Zero`] names a limit that is 0.
    pub fn check_limits(&self) -> Result<(), SettingsError> {
        let limits = [
            ("connections", self.connections as u64),
            ("reads_max", self.reads_max as u64),
            ("finds_max", self.finds_max as u64),
            ("queue_bytes", self.queue_bytes),
            ("object_bytes_max", self.object_bytes_max),
            ("timeout", self.timeout.as_micros() as u64),
            ("find_timeout", self.find_timeout.as_micros() as u64),
        ];
        let zero = limits.iter().find(|(_, limit)| *limit == 0);
        zero.map_or(Ok(()), |(name, _)| Err(SettingsError::Zero(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_passwords_refused() {
        let parse = |text| RemoteUrl::parse_url(text);
        assert_eq!(parse("s3://bucket/"), Ok(RemoteUrl::S3 { bucket: "bucket".to_owned() }));
        assert_eq!(parse("file:///a/b"), Ok(RemoteUrl::Folder(PathBuf::from("/a/b"))));
        for redis in ["redis://host:1/0", "rediss://host", "redis://user@host/2"] {
            assert_eq!(parse(redis), Ok(RemoteUrl::Redis(redis.to_owned())));
        }
        assert_eq!(parse("redis://:secret@host"), Err(SettingsError::PasswordInUrl));
        for text in ["", "host:1", "http://a", "redis://", "s3://", "s3://a/b", "file://a"] {
            assert_eq!(parse(text), Err(SettingsError::Url(text.to_owned())));
        }
    }
}
