//! Files that a command will write or read, looked at before it works for minutes.

use super::CliError;
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

/// Refuses outputs that could not be written: a folder that is missing or read-only, a folder in
/// the file's stead, one file for two outputs. Each is an option with its path; `-` is standard
/// output.
pub(super) fn check_outputs(outputs: &[(&str, Option<&Path>)]) -> Result<(), CliError> {
    let mut seen: Vec<(&str, PathBuf)> = Vec::new();
    for (option, path) in outputs {
        let Some(path) = path.filter(|path| path.as_os_str() != "-") else { continue };
        let refused =
            |reason: String| CliError::Usage(format!("{option} {}: {reason}", path.display()));
        try_write(path).map_err(|error| refused(cannot_write(path, &error)))?;
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if let Some((other, _)) = seen.iter().find(|(_, other)| *other == absolute) {
            return Err(refused(format!("{other} names the same file")));
        }
        seen.push((option, absolute));
    }
    Ok(())
}

/// Refuses inputs that are missing, cannot be read, or are devices, which need not end. A pipe is
/// not opened: its writer would find it closed.
pub(super) fn check_inputs<'a>(
    option: &str,
    paths: impl IntoIterator<Item = &'a PathBuf>,
) -> Result<(), CliError> {
    for path in paths {
        // A folder opens too, and is what some options take.
        let refused = |reason: String| {
            CliError::Usage(format!("{option}: cannot read {}: {reason}", path.display()))
        };
        if !kvd_eval::is_pipe(path).map_err(|error| refused(error.to_string()))? {
            File::open(path).map_err(|error| refused(error.to_string()))?;
        }
    }
    Ok(())
}

/// Opens a file as a later write will, and leaves everything as it was.
fn try_write(path: &Path) -> Result<(), Error> {
    match path.metadata() {
        Ok(there) if there.is_dir() => Err(Error::from(ErrorKind::IsADirectory)),
        // A pipe would wait for its reader.
        Ok(there) if !there.is_file() => Ok(()),
        Ok(_) => OpenOptions::new().write(true).open(path).map(|_| ()),
        Err(_) => {
            OpenOptions::new().write(true).create_new(true).open(path)?;
            std::fs::remove_file(path)
        }
    }
}

fn cannot_write(path: &Path, error: &Error) -> String {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if error.kind() == ErrorKind::NotFound && !folder.exists() => {
            format!("the folder {} is not there", folder.display())
        }
        _ => format!("cannot be written: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(outputs: &[(&str, Option<&Path>)]) -> String {
        let error = check_outputs(outputs).expect_err("refused");
        assert_eq!(error.exit_code(), 64, "{error}");
        error.to_string()
    }

    #[test]
    fn outputs_that_can_be_written_are_left_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new"));
        std::fs::write(&old, "kept").unwrap();
        let outputs = [("--json", Some(&*old)), ("--svg", Some(&*new)), ("--markdown", None)];
        check_outputs(&outputs).unwrap();
        check_outputs(&[("--json", Some(Path::new("-"))), ("--svg", Some(Path::new("-")))])
            .unwrap();
        check_outputs(&[("--json", Some(Path::new("/dev/null")))]).unwrap();
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "kept");
        assert!(!new.exists());
    }

    #[test]
    fn outputs_that_cannot_be_written_name_option_and_reason() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("none/x.md");
        let error = refusal(&[("--markdown", Some(&missing))]);
        assert!(error.starts_with("--markdown ") && error.contains("is not there"), "{error}");
        assert!(!dir.path().join("none").exists());
        let error = refusal(&[("--out", Some(dir.path()))]);
        assert!(error.contains("--out") && error.contains("directory"), "{error}");
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = refusal(&[("--out", Some(&file.join("below")))]);
        assert!(error.contains("cannot be written"), "{error}");
        let path = dir.path().join("x");
        let error = refusal(&[("--json", Some(&path)), ("--svg", Some(&path))]);
        assert!(error.contains("--svg") && error.contains("--json names the same"), "{error}");
        let error = check_inputs("--text", [&missing]).unwrap_err();
        assert_eq!(error.exit_code(), 64);
        assert!(error.to_string().contains("--text: cannot read"), "{error}");
        let error = check_inputs("--text", [&PathBuf::from("/dev/zero")]).unwrap_err();
        assert!(error.to_string().contains("it is a device"), "{error}");
    }
}
