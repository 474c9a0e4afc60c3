//! The file of a Unix socket: whose it is, when it may be replaced, and when removed.

use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use tokio::net::{UnixListener, UnixStream};

/// A socket file of this process; dropping it removes the file, if it still is that one.
pub(super) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another daemon may have bound the path since; its file stays.
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            // Gone meanwhile is as good.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Device and inode.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// A socket that nobody serves any more is what a crash leaves behind: it is replaced. One that
/// answers belongs to a running daemon, and anything else at the path to somebody who wants it.
pub(super) async fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            check_abandoned(path).await?;
            std::fs::remove_file(path)?;
            UnixListener::bind(path)?
        }
        result => result?,
    };
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    Ok((listener, file))
}

async fn check_abandoned(path: &Path) -> io::Result<()> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        let message = "the path exists and is not a socket; it is left as it is";
        return Err(io::Error::new(ErrorKind::AlreadyExists, message));
    }
    match UnixStream::connect(path).await {
        Ok(_) => Err(io::Error::new(ErrorKind::AddrInUse, "another process serves this socket")),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => {
            let message =
                format!("a socket is there, and whether it is served is unknown: {error}");
            Err(io::Error::new(error.kind(), message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_abandoned_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvd.sock");
        // Closing a listener leaves its file.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let (_listener, file) = bind(&path).await.unwrap();
        UnixStream::connect(&path).await.unwrap();
        drop(file);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_served_socket_is_refused_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvd.sock");
        let (_listener, _file) = bind(&path).await.unwrap();
        let error = bind(&path).await.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        UnixStream::connect(&path).await.unwrap();
    }

    #[tokio::test]
    async fn other_files_are_never_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        std::fs::write(&path, "precious").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for path in [&path, &link] {
            let error = bind(path).await.map(|_| ()).unwrap_err();
            assert!(error.to_string().contains("not a socket"), "{error}");
            assert_eq!(std::fs::read_to_string(path).unwrap(), "precious");
        }
    }

    #[tokio::test]
    async fn a_path_that_another_took_over_is_left_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvd.sock");
        let (_old, old_file) = bind(&path).await.unwrap();
        // As an operator would who clears the path by hand. The old inode lives on under another
        // name, so that its number cannot be given out again.
        std::fs::rename(&path, dir.path().join("old.sock")).unwrap();
        let (_new, _new_file) = bind(&path).await.unwrap();
        drop(old_file);
        UnixStream::connect(&path).await.unwrap();
    }
}
