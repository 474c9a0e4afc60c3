//! Files that an operator names: read whole, and never more than such a file can have. A device or
//! a pipe that does not end takes no memory.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::Path;

/// Most bytes of a configuration, a policy, a token, a key or certificates.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The bytes of a file.
///
/// # Errors
/// When it cannot be read, or has more than 1 MiB.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
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
}
