//! Parsers of options that several commands take.

use super::table::wrap_indented;
use crate::bounded_file::read_text;
use crate::config::SizeSetting;
use bytesize::ByteSize;
use std::fmt::Display;
use std::path::Path;

/// A codec as every command takes it: a preset's name, a spec, or `@FILE` for a policy file. The
/// text is what it was given as, of a file what is in it.
pub(super) fn codec_text(text: &str) -> Result<String, String> {
    let Some(path) = text.strip_prefix('@') else {
        let known = kvd_codec::resolve_spec(text).map(|_| text.trim().to_owned());
        return known.map_err(refused_codec);
    };
    let policy = read_text(Path::new(path));
    let policy = policy.map_err(|error| format!("cannot read {path}: {error}"))?;
    let spec = kvd_codec::resolve_spec(&policy).map_err(|error| {
        let (line, column) = error.line_and_column(&policy);
        refused_codec(format!("policy file {path}, line {line}, column {column}: {error}"))
    })?;
    Ok(spec.to_string())
}

/// Why a text is no codec, in lines of its own, and where there are some.
pub(super) fn refused_codec(error: impl Display) -> String {
    let lines = wrap_indented(&error.to_string(), "  ");
    format!("\n{lines}  `kvd codecs` lists all presets")
}

/// A size, checked, as the text that settings take.
#[cfg(feature = "eval")]
pub(super) fn size_text(text: &str) -> Result<String, String> {
    text.parse::<SizeSetting>().map(|size| size.to_string())
}

/// A size.
pub(super) fn parse_size(text: &str) -> Result<ByteSize, String> {
    text.parse::<SizeSetting>().map(|size| ByteSize(size.as_u64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_codec_is_a_preset_a_spec_or_a_file() {
        assert_eq!(codec_text(" kivi-4 ").unwrap(), "kivi-4");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.policy");
        let named = format!("@{}", path.display());
        std::fs::write(&path, "# for production\nk=fp8; # keys\nv=raw\n").unwrap();
        assert_eq!(codec_text(&named).unwrap(), "k=fp8; v=raw");
        std::fs::write(&path, "# for production\nk=fp9; v=raw\n").unwrap();
        let error = codec_text(&named).unwrap_err();
        assert!(error.contains("line 2, column 3"), "{error}");
        let error = codec_text("k=raw; v=fp9").unwrap_err();
        assert!(error.contains("character 9") && error.contains("kvd codecs"), "{error}");
        assert!(codec_text("@/no/such").unwrap_err().contains("/no/such"));
    }

    #[test]
    fn a_size_is_told_what_it_looks_like() {
        assert_eq!(parse_size("1.5 GiB").unwrap(), ByteSize(3 << 29));
        assert!(parse_size("lots").unwrap_err().contains("a size such as 4 GiB"));
    }
}
