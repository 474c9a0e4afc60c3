//! Files that an operator names: read whole, and never more than such a file can have. A device or
//! a pipe that does not end takes no memory.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// Most bytes of a configuration, a policy, a token, a key or certificates.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// How long a pipe may have no writer.
const WRITER_TIME: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Opens a file, or a pipe that has a writer, as `<(command)` of a shell has.
///
/// # Errors
/// When it cannot be opened, or is a pipe that nobody opens to write in ten seconds.
pub(crate) fn open_file(path: &Path) -> Result<File, Error> {
    if !path.metadata()?.file_type().is_fifo() {
        return File::open(path);
    }
    let (opened, file) = mpsc::sync_channel(1);
    let owned = path.to_owned();
    // Opening waits for a writer, and nothing but a writer ends that.
    std::thread::spawn(move || opened.send(File::open(owned)));
    file.recv_timeout(WRITER_TIME).unwrap_or_else(|_| {
        // A writer for a moment: the thread goes.
        let flags = OFlags::WRONLY | OFlags::NONBLOCK;
        drop(rustix::fs::open(path, flags, Mode::empty()));
        Err(Error::new(ErrorKind::TimedOut, "it is a pipe that nobody writes to"))
    })
}

/// The bytes of a file.
///
/// # Errors
/// As [`open_file`], and when it has more than 1 MiB.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    open_file(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(Error::new(ErrorKind::FileTooLarge, "it has more than 1 MiB"));
    }
    Ok(bytes)
}

/// The text of a file.
///
/// # Errors
/// As [`read_bytes`], and when it is no UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String, Error> {
    String::from_utf8(read_bytes(path)?)
        .map_err(|_| Error::new(ErrorKind::InvalidData, "it is no UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_without_an_end_are_refused() {
        let error = read_bytes(Path::new("/dev/zero")).unwrap_err();
        assert!(error.to_string().contains("more than 1 MiB"), "{error}");
        assert!(read_text(Path::new("/dev/zero")).is_err());
        assert!(read_bytes(Path::new("/dev/null")).unwrap().is_empty());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("most");
        std::fs::write(&path, vec![b'#'; FILE_BYTES_MAX as usize]).unwrap();
        assert_eq!(read_text(&path).unwrap().len() as u64, FILE_BYTES_MAX);
    }

    #[test]
    fn pipes_are_read_and_one_without_a_writer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let status = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(status.success());
        let error = read_bytes(&path).unwrap_err();
        assert!(error.to_string().contains("nobody writes"), "{error}");
        // Nobody reads any more: the open that was given up has ended.
        let flags = OFlags::WRONLY | OFlags::NONBLOCK;
        let reads = || rustix::fs::open(&path, flags, Mode::empty()).is_ok();
        let tries = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            !reads()
        });
        assert!(tries, "the thread still waits");
        let writer = std::thread::spawn({
            let path = path.clone();
            move || {
                std::thread::sleep(WRITER_TIME / 4);
                std::fs::write(path, "late but there").unwrap();
            }
        });
        assert_eq!(read_text(&path).unwrap(), "late but there");
        writer.join().unwrap();
    }
}
