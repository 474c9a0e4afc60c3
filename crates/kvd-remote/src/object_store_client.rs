//! Stores of objects: S3-compatible servers, and folders of a file system that daemons share.
//!
//! Look-ups ask for the heads of a prefix's first object, then of 2, 4, 8 and 16 at a time. Nothing
//! is retried here: the tier's breaker and the next call do that.

use crate::settings::SettingsError;
use crate::store::{RemoteStore, StoreFailure, StoreFuture};
use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{Error, ObjectStoreExt, PutPayload};
use std::path::Path;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Look-ups of one call at a time.
const FINDS_MAX: usize = 16;

pub(crate) struct ObjectStore {
    client: Arc<dyn object_store::ObjectStore>,
}

impl ObjectStore {
    /// Objects as files below a folder, which must be there.
    pub(crate) fn of_folder(folder: &Path) -> Result<Self, SettingsError> {
        let client = LocalFileSystem::new_with_prefix(folder)
            .map_err(|error| SettingsError::Client(error.to_string()))?;
        Ok(Self { client: Arc::new(client) })
    }

    /// Objects of a bucket. Credentials come from the environment, as they do for other clients of
    /// S3.
    #[cfg(feature = "s3")]
    pub(crate) fn of_bucket(
        bucket: &str,
        settings: &crate::RemoteSettings,
    ) -> Result<Self, SettingsError> {
        use object_store::aws::AmazonS3Builder;
        use object_store::{ClientOptions, RetryConfig};
        // A process has one.
        let _already_there = rustls::crypto::ring::default_provider().install_default();
        let options = ClientOptions::new()
            .with_timeout(settings.timeout)
            .with_connect_timeout(settings.timeout)
            .with_allow_http(settings.endpoint.starts_with("http://"));
        let retry = RetryConfig {
            max_retries: 0,
            retry_timeout: settings.timeout,
            ..RetryConfig::default()
        };
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_client_options(options)
            .with_retry(retry);
        if !settings.endpoint.is_empty() {
            builder = builder.with_endpoint(&settings.endpoint);
        }
        if !settings.region.is_empty() {
            builder = builder.with_region(&settings.region);
        }
        let client = builder.build().map_err(|error| SettingsError::Client(error.to_string()))?;
        Ok(Self { client: Arc::new(client) })
    }

    /// How many of these objects are there, from the first on; all are asked for at once.
    async fn count_window(&self, paths: &[String]) -> Result<usize, StoreFailure> {
        let mut heads = JoinSet::new();
        for (index, path) in paths.iter().enumerate() {
            let (client, path) = (Arc::clone(&self.client), ObjectPath::from(&path[..]));
            heads.spawn(async move { (index, client.head(&path).await) });
        }
        let mut found = paths.len();
        while let Some(head) = heads.join_next().await {
            let (index, head) = head.map_err(|error| StoreFailure::Failed(error.to_string()))?;
            match head {
                Ok(_) => {}
                Err(Error::NotFound { .. }) => found = found.min(index),
                Err(error) => return Err(failure_of(&error)),
            }
        }
        Ok(found)
    }
}

fn failure_of(error: &Error) -> StoreFailure {
    let text = error.to_string();
    match error {
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            StoreFailure::Denied(text)
        }
        _ => StoreFailure::Failed(text),
    }
}

impl RemoteStore for ObjectStore {
    fn count_present<'a>(&'a self, paths: &'a [String]) -> StoreFuture<'a, usize> {
        Box::pin(async move {
            let (mut found, mut many) = (0, 1);
            while found < paths.len() {
                let asked = &paths[found..paths.len().min(found + many)];
                let there = self.count_window(asked).await?;
                found += there;
                if there < asked.len() {
                    break;
                }
                many = (2 * many).min(FINDS_MAX);
            }
            Ok(found)
        })
    }

    fn read_object<'a>(&'a self, path: &'a str, bytes_max: u64) -> StoreFuture<'a, Option<Bytes>> {
        Box::pin(async move {
            let got = match self.client.get(&ObjectPath::from(path)).await {
                Err(Error::NotFound { .. }) => return Ok(None),
                got => got.map_err(|error| failure_of(&error))?,
            };
            // Somebody else's: it is not read, and no record either.
            if got.meta.size > bytes_max {
                return Ok(Some(Bytes::new()));
            }
            got.bytes().await.map(Some).map_err(|error| failure_of(&error))
        })
    }

    fn write_object<'a>(&'a self, path: &'a str, bytes: Bytes) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let put = self.client.put(&ObjectPath::from(path), PutPayload::from(bytes)).await;
            put.map(drop).map_err(|error| failure_of(&error))
        })
    }

    fn remove_object<'a>(&'a self, path: &'a str) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            match self.client.delete(&ObjectPath::from(path)).await {
                Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(failure_of(&error)),
            }
        })
    }
}
