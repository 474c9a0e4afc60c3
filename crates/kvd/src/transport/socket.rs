//! The file of a Unix socket: whose it is, when it may be replaced, and when removed.
//!
//! Two rules make a file belong to one daemon. It is removed *before* its listener closes: until
//! then the kernel keeps the inode, so that no other file can have its number, and no other daemon
//! replaces a path that answers. And whoever looks whether a path is abandoned, removes what is
//! there and binds anew, does all of it under a lock of the folder, which the kernel gives back
//! when its holder dies.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::Stream;

/// A listener and its file. Dropping it removes the file, if it still is that one, and closes the
/// listener after that.
pub(super) struct BoundSocket<L = UnixListener> {
    // Dropped first: an inode number means this file only while the listener is open.
    _file: SocketFile,
    listener: L,
}

impl BoundSocket {
    /// The next connection.
    pub(super) async fn accept_stream(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }
}

impl Stream for BoundSocket {
    type Item = io::Result<UnixStream>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let accepted = ready!(self.listener.poll_accept(context));
        Poll::Ready(Some(accepted.map(|(stream, _)| stream)))
    }
}

/// The name of a bound socket in the file system.
struct SocketFile {
    path: PathBuf,
    identity: FileIdentity,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // An operator may have cleared the path, and another daemon bound it; its file stays.
        if FileIdentity::of_path(&self.path).is_ok_and(|now| now == self.identity) {
            // Gone meanwhile is as good.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Identity of a file among all others, while it or a socket bound to it is open.
#[derive(PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    fn of_path(path: &Path) -> io::Result<Self> {
        let metadata = std::fs::symlink_metadata(path)?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino() })
    }
}

/// How long another daemon may take to bind in the same folder, and how often it is looked at.
const LOCK_TIME: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The right to bind and replace sockets of a folder. None where the file system knows no such
/// locks: then two daemons that start at one moment over an abandoned socket may both take it.
async fn lock_folder(path: &Path) -> io::Result<Option<File>> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // A lock needs no right to write. Without a right to read, binding itself says what is wrong.
    let folder = match File::open(folder) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Ok(None),
        folder => folder?,
    };
    let attempts = LOCK_TIME.as_millis() / LOCK_PAUSE.as_millis();
    for _ in 0..attempts {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(folder)),
            Err(Errno::WOULDBLOCK | Errno::INTR) => tokio::time::sleep(LOCK_PAUSE).await,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "the socket's folder has no locks");
                return Ok(None);
            }
        }
    }
    let message = "another process holds a lock (flock) of the socket's folder";
    Err(io::Error::new(ErrorKind::WouldBlock, message))
}

/// A socket that nobody has any more is what a crash leaves behind: it is replaced. One that
/// answers belongs to a running daemon, and anything else at the path to somebody who wants it.
pub(super) async fn bind_path(path: &Path) -> io::Result<BoundSocket> {
    let _lock = lock_folder(path).await?;
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            check_abandoned(path).await?;
            std::fs::remove_file(path)?;
            UnixListener::bind(path)?
        }
        result => result?,
    };
    let identity = FileIdentity::of_path(path)?;
    Ok(BoundSocket { _file: SocketFile { path: path.to_owned(), identity }, listener })
}

async fn check_abandoned(path: &Path) -> io::Result<()> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        let message = "the path exists and is not a socket; it is left as it is";
        return Err(io::Error::new(ErrorKind::AlreadyExists, message));
    }
    match UnixStream::connect(path).await {
        Ok(_) => Err(io::Error::new(ErrorKind::AddrInUse, "another process serves this socket")),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => check_unbound(path),
        Err(error) => Err(unknown_owner(&error)),
    }
}

/// A socket that is bound and does not listen yet refuses connections as one does that nobody has.
/// A socket of another type tells them apart: of the former the kernel says that the types differ.
fn check_unbound(path: &Path) -> io::Result<()> {
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::PROTOTYPE) => {
            let message = "another process has bound this socket, and does not listen yet";
            Err(io::Error::new(ErrorKind::AddrInUse, message))
        }
        Err(error) => Err(unknown_owner(&error)),
        Ok(()) => {
            let message = "another process has this socket, for datagrams";
            Err(io::Error::new(ErrorKind::AddrInUse, message))
        }
    }
}

fn unknown_owner(error: &io::Error) -> io::Error {
    let message = format!("a socket is there, and whether it is served is unknown: {error}");
    io::Error::new(error.kind(), message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::net::UnixSocket;

    #[tokio::test]
    async fn an_abandoned_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvd.sock");
        // Closing a listener leaves its file.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = bind_path(&path).await.unwrap();
        UnixStream::connect(&path).await.unwrap();
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_served_socket_is_refused_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvd.sock");
        let _socket = bind_path(&path).await.unwrap();
        let error = bind_path(&path).await.map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
        UnixStream::connect(&path).await.unwrap();
    }

    #[tokio::test]
    async fn a_socket_that_does_not_listen_yet_stays_as_long_as_it_is_open() {
        for folder in folders() {
            let path = folder.path().join("kvd.sock");
            for open_socket in [UnixSocket::new_stream, UnixSocket::new_datagram] {
                let socket = open_socket().unwrap();
                socket.bind(&path).unwrap();
                let bound = FileIdentity::of_path(&path).unwrap();
                assert!(bind_path(&path).await.is_err());
                assert!(FileIdentity::of_path(&path).unwrap() == bound);
                drop(socket);
                drop(bind_path(&path).await.unwrap());
                assert!(!path.exists());
            }
        }
    }

    #[tokio::test]
    async fn other_files_are_never_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        std::fs::write(&path, "precious").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for path in [&path, &link] {
            let error = bind_path(path).await.map(|_| ()).unwrap_err();
            assert!(error.to_string().contains("not a socket"), "{error}");
            assert_eq!(std::fs::read_to_string(path).unwrap(), "precious");
        }
    }

    #[tokio::test]
    async fn a_path_that_another_took_over_is_left_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvd.sock");
        let old = bind_path(&path).await.unwrap();
        // As an operator would who clears the path by hand. The old inode lives on under another
        // name, so that its number cannot be given out again.
        std::fs::rename(&path, dir.path().join("old.sock")).unwrap();
        let _new = bind_path(&path).await.unwrap();
        drop(old);
        UnixStream::connect(&path).await.unwrap();
    }

    /// Folders beside the test's program, on a disk in most places, and on a tmpfs where one is.
    fn folders() -> Vec<tempfile::TempDir> {
        let beside = std::env::current_exe().unwrap();
        let places = [beside.parent().unwrap(), Path::new("/dev/shm")];
        let places = places.into_iter().filter(|place| place.is_dir());
        places.map(|place| tempfile::tempdir_in(place).unwrap()).collect()
    }

    #[tokio::test]
    async fn the_file_is_gone_before_its_number_can_be_another_ones() {
        for folder in folders() {
            let path = folder.path().join("kvd.sock");
            let old = bind_path(&path).await.unwrap();
            let BoundSocket { _file: file, listener } = old;
            // The path is free while the old listener, and with it the inode, still lives.
            drop(file);
            assert!(!path.exists());
            let new = bind_path(&path).await.unwrap();
            let inode = FileIdentity::of_path(&path).unwrap();
            drop(listener);
            assert!(FileIdentity::of_path(&path).is_ok_and(|now| now == inode));
            UnixStream::connect(&path).await.unwrap();
            drop(new);
            assert!(!path.exists());
        }
    }

    /// A listener that notes, when it closes, whether its file is still there.
    struct Watched {
        _listener: UnixListener,
        path: PathBuf,
        had_file: Arc<AtomicBool>,
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            // Its own fields are dropped after this: the listener is open yet.
            self.had_file.store(self.path.exists(), Ordering::Release);
        }
    }

    #[tokio::test]
    async fn a_listener_outlives_its_file_so_that_no_successor_has_the_number_meanwhile() {
        for folder in folders() {
            let path = folder.path().join("kvd.sock");
            let BoundSocket { _file, listener } = bind_path(&path).await.unwrap();
            let had_file = Arc::new(AtomicBool::new(true));
            let watched =
                Watched { _listener: listener, path: path.clone(), had_file: had_file.clone() };
            drop(BoundSocket { _file, listener: watched });
            assert!(!had_file.load(Ordering::Acquire), "the listener closed first");
            // And a file of the same number that is bound after that is the successor's alone.
            let new = bind_path(&path).await.unwrap();
            UnixStream::connect(&path).await.unwrap();
            drop(new);
            assert!(!path.exists());
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_daemons_that_race_for_an_abandoned_socket_one_has_it() {
        for folder in folders() {
            let path = folder.path().join("kvd.sock");
            for _ in 0..20 {
                drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
                let race = (0..8).map(|_| {
                    let path = path.clone();
                    tokio::spawn(async move { bind_path(&path).await })
                });
                let mut bound = Vec::new();
                for racer in race.collect::<Vec<_>>() {
                    bound.extend(racer.await.unwrap().ok());
                }
                assert_eq!(bound.len(), 1);
                UnixStream::connect(&path).await.unwrap();
                drop(bound);
                assert!(!path.exists());
            }
        }
    }

    #[tokio::test]
    async fn a_locked_folder_is_waited_for_and_then_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kvd.sock");
        let holder = File::open(folder.path()).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let waiting = tokio::spawn({
            let path = path.clone();
            async move { bind_path(&path).await }
        });
        tokio::time::sleep(LOCK_PAUSE * 5).await;
        assert!(!waiting.is_finished() && !path.exists());
        drop(holder);
        let _bound = waiting.await.unwrap().unwrap();
        assert!(path.exists());
    }
}
