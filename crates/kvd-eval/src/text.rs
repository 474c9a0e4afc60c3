//! Text files as tokens.

use crate::UsageError;
use crate::input_file::read_input;
use anyhow::{Context, Result};
use kvd_engine::ModelAssets;
use std::ops::Range;
use std::path::Path;

/// The first `wanted` tokens of a file, or all if it has fewer.
pub(crate) fn token_ids(assets: &ModelAssets, path: &Path, wanted: usize) -> Result<Vec<u32>> {
    let bytes = read_input(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        UsageError(format!("{} is not UTF-8 from byte {at} on", path.display()))
    })?;
    // Tokens stand for about four characters; a book would take the tokenizer minutes.
    let mut characters = wanted * 8;
    loop {
        let end = text.char_indices().nth(characters).map_or(text.len(), |(at, _)| at);
        let ids = assets.encode_text(&text[..end])?;
        if ids.len() >= wanted || end == text.len() {
            return Ok(ids);
        }
        characters *= 2;
    }
}

/// `wanted` windows of `windows`, evenly apart: neighbours tell about the same things, and a
/// calibration should have met more than one.
pub(crate) fn spread_windows(windows: Range<usize>, wanted: usize) -> impl Iterator<Item = usize> {
    (0..wanted).map(move |i| windows.start + (2 * i + 1) * windows.len() / (2 * wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_utf8_gives_tokens_and_what_is_not_is_named() {
        let assets = ModelAssets::embedded_fixture().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, "Grüße, 世界! 🦀 ".repeat(200)).unwrap();
        let ids = token_ids(&assets, &path, 300).unwrap();
        assert!(ids.len() >= 300 && ids.iter().all(|&id| id < 2048), "{}", ids.len());
        assert!(token_ids(&assets, &path, 1 << 20).unwrap().len() < 1 << 20);
        std::fs::write(&path, b"good\xff").unwrap();
        let error = format!("{:#}", token_ids(&assets, &path, 3).unwrap_err());
        assert!(error.contains("not UTF-8 from byte 4"), "{error}");
        let error = format!("{:#}", token_ids(&assets, Path::new("/none"), 3).unwrap_err());
        assert!(error.contains("/none"), "{error}");
    }

    #[test]
    fn windows_are_spread_over_all_and_none_is_taken_twice() {
        let spread = |range, wanted| spread_windows(range, wanted).collect::<Vec<_>>();
        assert_eq!(spread(2..24, 2), [7, 18]);
        assert_eq!(spread(2..7, 5), [2, 3, 4, 5, 6]);
        assert_eq!(spread(0..5, 4), [0, 1, 3, 4]);
        assert!(spread(3..3, 0).is_empty());
    }
}
