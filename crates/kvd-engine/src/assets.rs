//! Where the model comes from: a directory, or the fixture compiled into the program.

use crate::error::ModelError;
use crate::weights::{WeightFiles, read_file};
use anyhow::{Result, bail, ensure};
use std::borrow::Cow;
use std::path::Path;
use tokenizers::Tokenizer;

/// The files of a model that a run needs, as bytes.
pub struct ModelAssets {
    /// For titles: the directory's name.
    pub name: String,
    /// Whether this is the fixture compiled in.
    pub embedded: bool,
    /// `config.json`.
    pub config: Cow<'static, [u8]>,
    /// `model.safetensors`, or what its index lists.
    pub weights: WeightFiles,
    /// `tokenizer.json`, read.
    pub tokenizer: Tokenizer,
    /// Held-out text as token ids; empty where the folder has none.
    pub held_out: Vec<u32>,
}

macro_rules! fixture {
    ($file:literal) => {
        include_bytes!(concat!("../../../tests/fixtures/kv-tiny-b/", $file))
    };
}

impl ModelAssets {
    /// Name of the fixture.
    pub const FIXTURE: &'static str = "kv-tiny-b";

    /// The fixture compiled into the program, so that no working directory matters.
    ///
    /// # Errors
    /// When the compiled-in files do not parse: a defect of the build.
    pub fn embedded_fixture() -> Result<Self> {
        Ok(Self {
            name: Self::FIXTURE.to_owned(),
            embedded: true,
            config: Cow::Borrowed(fixture!("config.json")),
            weights: WeightFiles::Embedded(fixture!("model.safetensors")),
            tokenizer: parse_tokenizer(fixture!("tokenizer.json"))?,
            held_out: token_ids(fixture!("eval_ids.u16"))?,
        })
    }

    /// A directory laid out as on Hugging Face (`config.json`, `model.safetensors` or its shards
    /// and their index, `tokenizer.json`) plus held-out text: `eval_ids.u16`, else `eval.txt`,
    /// else none.
    ///
    /// # Errors
    /// [`ModelError`] when a file is missing or does not parse; the message names it.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let read = |file: &str| read_file(&dir.join(file));
        let wrong = |file: &str, reason: String| ModelError::file_error(&dir.join(file), reason);
        let config = Cow::Owned(read("config.json")?);
        let weights = WeightFiles::find_files(dir)?;
        let tokenizer = parse_tokenizer(&read("tokenizer.json")?)
            .map_err(|error| wrong("tokenizer.json", format!("{error:#}")))?;
        let held_out = if dir.join("eval_ids.u16").exists() {
            token_ids(&read("eval_ids.u16")?)
                .map_err(|error| wrong("eval_ids.u16", format!("{error:#}")))?
        } else if dir.join("eval.txt").exists() {
            let text = String::from_utf8(read("eval.txt")?).map_err(|error| {
                let at = error.utf8_error().valid_up_to();
                wrong("eval.txt", format!("is not UTF-8 from byte {at} on"))
            })?;
            encode_ids(&tokenizer, &text)?
        } else {
            Vec::new()
        };
        let name = dir.file_name().map_or("model".into(), |name| name.to_string_lossy().into());
        Ok(Self { name, embedded: false, config, weights, tokenizer, held_out })
    }

    /// [`ModelAssets::from_dir`] when a directory is given, else [`ModelAssets::embedded`].
    ///
    /// # Errors
    /// As those two.
    pub fn resolve_folder(dir: Option<&Path>) -> Result<Self> {
        dir.map_or_else(Self::embedded_fixture, Self::from_dir)
    }

    /// The held-out text.
    ///
    /// # Errors
    /// [`ModelError::File`] when the folder has none.
    pub fn held_out(&self) -> Result<&[u32], ModelError> {
        if self.held_out.is_empty() {
            let reason = "the model folder has no held-out text: put eval.txt, a few hundred kB in \
                          UTF-8, beside config.json, or give --text where the command takes it";
            return Err(ModelError::File { file: self.name.clone(), reason: reason.to_owned() });
        }
        Ok(&self.held_out)
    }

    /// The tokens of `text`, no special tokens added.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        encode_ids(&self.tokenizer, text)
    }

    /// The text of `ids`, special tokens left out.
    ///
    /// # Errors
    /// When the tokenizer refuses an id.
    pub fn decode_ids(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(anyhow::Error::msg)
    }
}

fn parse_tokenizer(bytes: &[u8]) -> Result<Tokenizer> {
    Tokenizer::from_bytes(bytes).map_err(anyhow::Error::msg)
}

fn encode_ids(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(text, false).map_err(anyhow::Error::msg)?;
    Ok(encoding.get_ids().to_vec())
}

fn token_ids(bytes: &[u8]) -> Result<Vec<u32>> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    ensure!(rest.is_empty(), "has an odd number of bytes");
    Ok(pairs.iter().map(|pair| u32::from(u16::from_le_bytes(*pair))).collect())
}

/// Held-out windows as the model was trained to see them: `tokens` inputs that begin with the
/// document separator (id 0), and the id each input must predict.
#[derive(Clone, Debug)]
pub struct TokenWindow {
    /// `[bos] + ids[i*T .. (i+1)*T - 1]`.
    pub inputs: Vec<u32>,
    /// `ids[i*T .. (i+1)*T]`.
    pub targets: Vec<u32>,
}

impl TokenWindow {
    /// Window `index` of `tokens` tokens of `ids`.
    ///
    /// # Errors
    /// When the text is too short.
    pub fn new(ids: &[u32], bos: u32, tokens: usize, index: usize) -> Result<Self> {
        let Some(targets) = ids.get(index * tokens..(index + 1) * tokens) else {
            bail!(
                "held-out text has {} tokens: window {index} of {tokens} lies outside; \
                 ask for fewer or shorter ones",
                ids.len()
            );
        };
        let inputs = std::iter::once(bos).chain(targets.iter().copied()).take(tokens).collect();
        Ok(Self { inputs, targets: targets.to_vec() })
    }

    /// How many whole windows `ids` holds.
    #[must_use]
    pub fn count_windows(ids: &[u32], tokens: usize) -> usize {
        ids.len() / tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokenizer_reproduces_the_stored_ids_and_the_text() {
        let assets = ModelAssets::embedded_fixture().unwrap();
        let text = include_str!("../../../tests/fixtures/kv-tiny-b/eval.txt");
        let head: String = text.chars().take(20_000).collect();
        let encoding = assets.tokenizer.encode(head.as_str(), false).unwrap();
        let ids = encoding.get_ids();
        // The last tokens may merge with the text that was cut off.
        assert!(ids.len() > 4000);
        let sure = ids.len() - 8;
        assert_eq!(&ids[..sure], &assets.held_out[..sure]);
        assert!(
            head.starts_with(&assets.decode_ids(&ids[..200]).unwrap().replace("<|endoftext|>", ""))
        );
    }

    #[test]
    fn windows_shift_inputs_by_one_and_refuse_to_leave_the_text() {
        let ids: Vec<u32> = (10..30).collect();
        let window = TokenWindow::new(&ids, 0, 8, 1).unwrap();
        assert_eq!(window.inputs, [0, 18, 19, 20, 21, 22, 23, 24]);
        assert_eq!(window.targets, (18..26).collect::<Vec<_>>());
        assert!(TokenWindow::new(&ids, 0, 8, 2).is_err());
        assert_eq!(TokenWindow::count_windows(&ids, 8), 2);
    }
}
