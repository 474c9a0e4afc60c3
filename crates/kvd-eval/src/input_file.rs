//! Files that a user names as input: read whole, and waited for with a word where they are pipes.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::Duration;

/// Most bytes of a pipe: it need not end.
const PIPE_BYTES_MAX: u64 = 1 << 30;
/// A pipe that takes longer is named.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether an input is a pipe.
///
/// # Errors
/// When it is missing, or a device, which need not end.
pub fn is_pipe(path: &Path) -> Result<bool, Error> {
    let found = path.metadata()?.file_type();
    if found.is_char_device() || found.is_block_device() {
        return Err(Error::new(ErrorKind::InvalidInput, "it is a device, and no file"));
    }
    Ok(found.is_fifo())
}

/// The bytes of a file, or of a pipe until its writer closes it.
pub(crate) fn read_input(path: &Path) -> Result<Vec<u8>, Error> {
    if !is_pipe(path)? {
        return std::fs::read(path);
    }
    let text = format!("waiting for {}: a pipe whose writer has not closed it", path.display());
    let _notice = say_later(text, std::io::stderr());
    read_pipe(path, PIPE_BYTES_MAX)
}

fn read_pipe(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let reason = format!("it is a pipe, and gave more than {most} bytes");
        return Err(Error::new(ErrorKind::FileTooLarge, reason));
    }
    Ok(bytes)
}

/// Says a line after a while, unless what it gives is dropped before.
fn say_later(text: String, mut to: impl Write + Send + 'static) -> SyncSender<()> {
    let (done, wait) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            // Nobody may be there to read it.
            let _ = writeln!(to, "{text}");
        }
    });
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn pipes_are_read_until_they_are_closed_and_no_further_than_they_may_go() {
        assert!(read_input(Path::new("/dev/zero")).unwrap_err().to_string().contains("device"));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        for (most, fits) in [(1 << 20, true), (9, false)] {
            let writer = std::thread::spawn({
                let path = path.clone();
                // A pipe that is closed before it was read fails its writer.
                move || std::fs::write(path, "ten bytes.").is_ok()
            });
            let read = read_pipe(&path, most);
            writer.join().unwrap();
            match read {
                Ok(bytes) => assert!(fits && bytes == b"ten bytes."),
                Err(error) => assert!(!fits && error.to_string().contains("more than 9 bytes")),
            }
        }
    }

    #[test]
    fn a_line_is_said_late_and_only_where_it_is_still_true() {
        let (early, late) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        drop(say_later("early".to_owned(), early.1));
        let _waiting = say_later("late".to_owned(), late.1);
        let said = |mut reader: std::io::PipeReader| {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            text
        };
        assert_eq!([said(early.0), said(late.0)], ["", "late\n"]);
    }
}
