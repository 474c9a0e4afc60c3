//! The file of what operators have set: small, and replaced as a whole, so that a crash at any
//! moment leaves the old one or the new one.

use super::{NamespaceTerms, TermsByName};
use crate::config::{check_weight, find_quota};
use kvd_core::Namespace;
use kvd_store::{QuotaKind, QuotaLimits};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Raised when an older daemon would misread the file.
const FORMAT: u32 = 1;

/// Larger files were not written by a daemon.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The file's content.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct QuotaState {
    format: u32,
    /// Limits by the names of namespaces and quotas.
    namespaces: BTreeMap<String, BTreeMap<String, u64>>,
    /// Weights by the names of namespaces.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    weights: BTreeMap<String, u32>,
}

/// Where quotas are kept.
#[derive(Debug)]
pub(super) struct QuotaFile(PathBuf);

impl QuotaFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Reads what was set; nothing where there is no file yet.
    ///
    /// # Errors
    /// Why the file cannot be read, and what to do.
    pub(super) fn read_terms(&self) -> Result<TermsByName, String> {
        let bytes = match read_whole(&self.0) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(self.describe_failure(&error.to_string())),
        };
        parse_state(&bytes).map_err(|reason| self.describe_failure(&reason))
    }

    fn describe_failure(&self, reason: &str) -> String {
        let path = self.0.display();
        format!(
            "{path} cannot be used: {reason}; bring back a good copy, or move it away to begin \
             with the quotas of the configuration"
        )
    }

    /// Whether it can be written: else the first operator who changes a quota would find out.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub(super) fn check_writable(&self) -> Result<(), String> {
        let new = self.path_of_new();
        let tried = File::create(&new).and_then(|_| std::fs::remove_file(&new));
        tried.map_err(|error| {
            let new = new.display();
            format!("{new} cannot be written: {error}; name a file in a folder of the daemon's own")
        })
    }

    fn parent_folder(&self) -> &Path {
        let folder = self.0.parent().filter(|folder| !folder.as_os_str().is_empty());
        folder.unwrap_or(Path::new("."))
    }

    /// The file that is written first and then takes the place of this one.
    fn path_of_new(&self) -> PathBuf {
        let mut name = self.0.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        self.parent_folder().join(name)
    }

    /// Writes it anew. Once this returns, it outlives a loss of power.
    ///
    /// # Errors
    /// Those of the system; the file is as it was.
    pub(super) fn write_terms(&self, terms: &TermsByName) -> io::Result<()> {
        let named = |limits: &QuotaLimits| {
            let limit_of =
                |kind: QuotaKind| Some((kind.quota_name().to_owned(), limits.limit_of(kind)?));
            QuotaKind::ALL.into_iter().filter_map(limit_of).collect()
        };
        let text_of = |name: &Namespace| name.as_str().to_owned();
        let namespaces = terms.iter().map(|(name, of)| (text_of(name), named(&of.limits)));
        let weights = terms.iter().filter_map(|(name, of)| Some((text_of(name), of.weight?)));
        let (namespaces, weights) = (namespaces.collect(), weights.collect());
        let state = QuotaState { format: FORMAT, namespaces, weights };
        let mut text = serde_json::to_vec_pretty(&state)?;
        text.push(b'\n');
        let new = self.path_of_new();
        let mut file = File::create(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&new, &self.0)?;
        // The name as well.
        File::open(self.parent_folder())?.sync_all()
    }
}

fn read_whole(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

fn parse_state(bytes: &[u8]) -> Result<TermsByName, String> {
    let state: QuotaState = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if state.format != FORMAT {
        return Err(format!("it has format {}, and this daemon reads {FORMAT}", state.format));
    }
    let mut all = TermsByName::new();
    for (name, named) in state.namespaces {
        let name = Namespace::new(&name).map_err(|error| error.to_string())?;
        let mut limits = QuotaLimits::default();
        for (quota, allowed) in named {
            limits.set_limit(find_quota(&quota)?, Some(allowed));
        }
        all.insert(name, NamespaceTerms { limits, weight: None });
    }
    for (name, weight) in state.weights {
        let name = Namespace::new(&name).map_err(|error| error.to_string())?;
        let of = all.get_mut(&name).ok_or_else(|| format!("it has a weight of {name} alone"))?;
        of.weight = Some(check_weight(weight)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some_terms() -> TermsByName {
        let mut limits = QuotaLimits::default();
        limits.set_limit(QuotaKind::PoolBytes, Some(2 << 30));
        limits.set_limit(QuotaKind::Sequences, Some(0));
        let names = ["a", "b.c_d-e"].map(|name| Namespace::new(name).unwrap());
        let none = QuotaLimits::default();
        let terms = [(limits, None), (none, Some(7))];
        names
            .into_iter()
            .zip(terms.map(|(limits, weight)| NamespaceTerms { limits, weight }))
            .collect()
    }

    #[test]
    fn what_is_written_is_read_and_replaces_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let file = QuotaFile::new(folder.path().join("quotas.json"));
        assert_eq!(file.read_terms(), Ok(BTreeMap::new()));
        file.write_terms(&some_terms()).unwrap();
        assert_eq!(file.read_terms(), Ok(some_terms()));
        // What a crash left of a write is not looked at, and is no hindrance.
        std::fs::write(folder.path().join("quotas.json.new"), b"{\"form").unwrap();
        assert_eq!(file.read_terms(), Ok(some_terms()));
        file.write_terms(&BTreeMap::new()).unwrap();
        assert_eq!(file.read_terms(), Ok(BTreeMap::new()));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_told_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quotas.json");
        let file = QuotaFile::new(path.clone());
        file.write_terms(&some_terms()).unwrap();
        assert_eq!(file.check_writable(), Ok(()));
        assert_eq!(file.read_terms(), Ok(some_terms()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        // Rights do not hold root back, this does.
        std::fs::create_dir(folder.path().join("quotas.json.new")).unwrap();
        for file in [file, QuotaFile::new(folder.path().join("none/quotas.json"))] {
            let error = file.check_writable().unwrap_err();
            assert!(error.contains("quotas.json.new cannot be written"), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_cut_off_anywhere_is_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quotas.json");
        let file = QuotaFile::new(path.clone());
        file.write_terms(&some_terms()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let text = String::from_utf8(whole.clone()).unwrap();
        let cut = (0..whole.trim_ascii_end().len()).map(|length| whole[..length].to_vec());
        let changed = [("pool_bytes", "pool_bites"), ("\"format\": 1", "\"format\": 2")]
            .into_iter()
            .chain([("\"a\"", "\"a b\""), ("2147483648", "-1"), ("2147483648", "1e30")])
            .chain([(": 7", ": 0"), (": 7", ": 1001"), ("\"b.c_d-e\": 7", "\"other\": 7")])
            .map(|(old, new)| text.replace(old, new).into_bytes());
        for bytes in cut.chain(changed).chain([b"\0\0\0".to_vec(), vec![b' '; 100]]) {
            std::fs::write(&path, &bytes).unwrap();
            let error = file.read_terms().expect_err(&String::from_utf8_lossy(&bytes));
            assert!(error.contains("quotas.json") && error.contains("move it away"), "{error}");
        }
    }
}
