//! Codecs and windows as the command line names them.

use crate::input_file::read_input;
use anyhow::{Context, Result, ensure};
use kvd_codec::CodecSpec;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A codec to evaluate.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalCodec {
    /// Name in tables: a preset's name, a policy file's stem, or the spec text.
    pub label: String,
    /// The codec.
    pub spec: CodecSpec,
}

impl EvalCodec {
    /// Every preset, in the order of `kvd codecs`.
    #[must_use]
    pub fn all_presets() -> Vec<Self> {
        let named = |preset: &kvd_codec::Preset| {
            Some(Self { label: preset.name.to_owned(), spec: kvd_codec::find_preset(preset.name)? })
        };
        kvd_codec::presets().iter().filter_map(named).collect()
    }

    /// The codec as a registration: by its preset's name where it is one, so that metrics say it.
    #[must_use]
    pub fn registration_text(&self) -> String {
        let Some(preset) = kvd_codec::find_preset(&self.label) else {
            return self.spec.to_string();
        };
        if preset == self.spec {
            return self.label.clone();
        }
        let (sink, recent) = (self.spec.sink, self.spec.recent);
        let same = CodecSpec { sink, recent, ..preset } == self.spec;
        let short = || format!("{}; sink={sink}; recent={recent}", self.label);
        if same { short() } else { self.spec.to_string() }
    }

    /// A policy file: one text over any number of lines, `#` begins a comment.
    ///
    /// # Errors
    /// When the file cannot be read or its text is no codec.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = read_input(path);
        let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
        let text = String::from_utf8(bytes);
        let text = text.with_context(|| format!("{} is no UTF-8 text", path.display()))?;
        let spec = kvd_codec::resolve_spec(&text).map_err(|error| {
            let (line, column) = error.line_and_column(&text);
            let at = format!("policy file {}, line {line}, column {column}", path.display());
            anyhow::Error::from(error).context(at)
        })?;
        let label = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        Ok(Self { label, spec })
    }
}

impl FromStr for EvalCodec {
    type Err = anyhow::Error;

    /// A preset's name, a spec text, or `@FILE` for a policy file.
    fn from_str(text: &str) -> Result<Self> {
        if let Some(path) = text.strip_prefix('@') {
            return Self::from_file(Path::new(path));
        }
        Ok(Self { label: text.trim().to_owned(), spec: kvd_codec::resolve_spec(text)? })
    }
}

/// Which windows a table's codecs have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowChoice {
    /// Each its own.
    Own,
    /// All the same.
    Same {
        /// First tokens kept in the stored precision.
        sink: u32,
        /// Last tokens kept so.
        recent: u32,
    },
}

impl WindowChoice {
    /// `spec` under these windows.
    #[must_use]
    pub fn apply_windows(self, mut spec: CodecSpec) -> CodecSpec {
        if let Self::Same { sink, recent } = self {
            (spec.sink, spec.recent) = (sink, recent);
        }
        spec
    }
}

impl fmt::Display for WindowChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("own"),
            Self::Same { sink, recent } => write!(f, "sink={sink},recent={recent}"),
        }
    }
}

impl FromStr for WindowChoice {
    type Err = anyhow::Error;

    /// `own`, or `sink=N,recent=N`; an omitted number is 0.
    fn from_str(text: &str) -> Result<Self> {
        if text.trim() == "own" {
            return Ok(Self::Own);
        }
        let (mut sink, mut recent) = (None, None);
        for item in text.split(',') {
            let (name, count) = item.split_once('=').unwrap_or((item, ""));
            let slot = match name.trim() {
                "sink" => &mut sink,
                "recent" => &mut recent,
                _ => anyhow::bail!("{item:?}: expected own, or sink=N,recent=N"),
            };
            let tokens: u32 = count
                .trim()
                .parse()
                .with_context(|| format!("{item:?}: expected a number of tokens"))?;
            ensure!(slot.replace(tokens).is_none(), "{} is given twice", name.trim());
        }
        Ok(Self::Same { sink: sink.unwrap_or(0), recent: recent.unwrap_or(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_parse_and_print_alike() {
        for text in ["own", "sink=32,recent=96", "sink=0,recent=128"] {
            assert_eq!(text.parse::<WindowChoice>().unwrap().to_string(), text);
        }
        let alone: WindowChoice = "recent=128".parse().unwrap();
        assert_eq!(alone, WindowChoice::Same { sink: 0, recent: 128 });
        for (text, part) in [
            ("", "expected"),
            ("sink=x", "expected a number"),
            ("sink=1,sink=2", "twice"),
            ("tail=3", "sink=N"),
        ] {
            let error = format!("{:#}", text.parse::<WindowChoice>().unwrap_err());
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }

    #[test]
    fn texts_are_short_where_a_preset_says_it() {
        for text in ["kivi-2", "kivi-2; sink=1; recent=2", "k=raw; v=raw; recent=7"] {
            let mut codec: EvalCodec = text.parse().unwrap();
            codec.label = codec.label.split(';').next().unwrap_or_default().to_owned();
            assert_eq!(codec.registration_text(), text);
        }
    }

    #[test]
    fn windows_replace_those_of_the_codec() {
        let codec: EvalCodec = "kivi-2".parse().unwrap();
        let same = WindowChoice::Same { sink: 32, recent: 96 };
        let spec = same.apply_windows(codec.spec.clone());
        assert_eq!((spec.sink, spec.recent), (32, 96));
        assert_eq!(WindowChoice::Own.apply_windows(codec.spec.clone()), codec.spec);
    }

    #[test]
    fn a_policy_file_holds_comments_and_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("small.policy");
        std::fs::write(&path, "# found by search\nk=fp8; # keys\nv=raw;\n sink=4\n").unwrap();
        let codec: EvalCodec = format!("@{}", path.display()).parse().unwrap();
        assert_eq!((codec.label.as_str(), codec.spec.sink), ("small", 4));
        std::fs::write(&path, "# one\nk=fp9; v=raw").unwrap();
        let error = format!("{:#}", EvalCodec::from_file(&path).unwrap_err());
        assert!(error.contains("small.policy, line 2, column 3"), "{error}");
        std::fs::write(&path, "\u{feff}# by hand\r\nkivi-4 # four bits\r\n; recent=64\r\n")
            .unwrap();
        let codec = EvalCodec::from_file(&path).unwrap();
        assert_eq!((codec.label.as_str(), codec.spec.recent), ("small", 64));
        let error = format!("{:#}", "@/no/such".parse::<EvalCodec>().unwrap_err());
        assert!(error.contains("/no/such"), "{error}");
    }

    #[test]
    fn every_preset_is_listed_once() {
        let labels: Vec<_> = EvalCodec::all_presets().into_iter().map(|c| c.label).collect();
        let names: Vec<_> = kvd_codec::presets().iter().map(|p| p.name).collect();
        assert_eq!(labels, names);
    }
}
