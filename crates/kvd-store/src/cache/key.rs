//! Keys of prefixes as engines give them, and the digests by which the index finds them.
//!
//! A key stands for all tokens from the start of a sequence to the end of its engine block. The
//! index has one entry a page, under the key of the last engine block of the page. Plain values,
//! no locks.

use std::hash::{BuildHasherDefault, Hasher};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Longest key, in bytes.
pub const KEY_BYTES_MAX: u32 = 64;

/// Keys side by side, all of one length.
#[derive(Clone, Copy, Debug)]
pub struct PackedKeys<'a> {
    /// The keys, from the first token of the prefix on.
    pub bytes: &'a [u8],
    /// Bytes of each: 1 to [`KEY_BYTES_MAX`].
    pub key_bytes: u32,
    /// Tokens between one key and the next: a divisor of the model's page.
    pub key_tokens: u32,
}

/// Why keys cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// A length that no key has.
    #[error("key_bytes is {given}: a key has 1 to {KEY_BYTES_MAX} bytes")]
    Length {
        /// Bytes of a key.
        given: u32,
    },
    /// Half a key at the end.
    #[error("keys: {bytes} bytes are no whole number of keys of {key_bytes} bytes")]
    Ragged {
        /// Bytes of all keys.
        bytes: u64,
        /// Bytes of a key.
        key_bytes: u32,
    },
    /// Keys that do not end where pages do.
    #[error(
        "key_tokens is {key_tokens}: it must divide the {block_tokens} tokens of the model's page"
    )]
    Tokens {
        /// Tokens of a key.
        key_tokens: u32,
        /// Tokens of a page.
        block_tokens: u32,
    },
}

/// The keys of a prefix, as many to each page of a model.
#[derive(Clone, Copy, Debug)]
pub struct KeyChain<'a> {
    bytes: &'a [u8],
    key_bytes: usize,
    keys_per_block: usize,
}

impl<'a> KeyChain<'a> {
    /// Reads keys for a model whose pages have `block_tokens` tokens. A page whose last key is
    /// missing is not named.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn new(keys: PackedKeys<'a>, block_tokens: u32) -> Result<Self, KeyError> {
        let PackedKeys { bytes, key_bytes, key_tokens } = keys;
        if key_bytes == 0 || key_bytes > KEY_BYTES_MAX {
            return Err(KeyError::Length { given: key_bytes });
        }
        if !bytes.len().is_multiple_of(key_bytes as usize) {
            return Err(KeyError::Ragged { bytes: bytes.len() as u64, key_bytes });
        }
        if key_tokens == 0 || !block_tokens.is_multiple_of(key_tokens) {
            return Err(KeyError::Tokens { key_tokens, block_tokens });
        }
        let keys_per_block = (block_tokens / key_tokens) as usize;
        Ok(Self { bytes, key_bytes: key_bytes as usize, keys_per_block })
    }

    /// Pages that are named.
    #[must_use]
    pub fn count_blocks(&self) -> usize {
        self.bytes.len() / self.key_bytes / self.keys_per_block
    }

    /// Keys of so many pages.
    #[must_use]
    pub fn count_keys(&self, blocks: usize) -> usize {
        blocks * self.keys_per_block
    }

    /// The key of a page, if there is such a page.
    #[must_use]
    pub fn find_key(&self, block: usize) -> Option<&'a [u8]> {
        (block < self.count_blocks()).then(|| self.block_key(block))
    }

    /// The key of a page.
    ///
    /// # Panics
    /// When there is no such page.
    pub(crate) fn block_key(&self, block: usize) -> &'a [u8] {
        let end = (block + 1) * self.keys_per_block * self.key_bytes;
        &self.bytes[end - self.key_bytes..end]
    }
}

/// Hash of a key within its model: where the index looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyDigest([u64; 2]);

/// Hash of all keys of a prefix: what an entry is compared by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct KeyLineage([u64; 2]);

fn split_words(hash: u128) -> [u64; 2] {
    [hash as u64, (hash >> 64) as u64]
}

fn join_words(words: [u64; 2]) -> u128 {
    u128::from(words[0]) | u128::from(words[1]) << 64
}

impl KeyDigest {
    pub(crate) fn to_number(self) -> u128 {
        join_words(self.0)
    }

    pub(crate) fn from_number(number: u128) -> Self {
        Self(split_words(number))
    }
}

impl KeyLineage {
    pub(crate) fn to_number(self) -> u128 {
        join_words(self.0)
    }

    pub(crate) fn from_number(number: u128) -> Self {
        Self(split_words(number))
    }
}

/// Makes digests and lineages under a secret of the daemon, so that nobody can choose keys that
/// meet in the index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyHasher {
    pub(crate) seed: u64,
}

impl KeyHasher {
    /// The digest of a key in a space of keys: a model's id, or a word of its scope.
    pub(crate) fn digest_key(self, space: u64, key: &[u8]) -> KeyDigest {
        let mut text = [0; 8 + KEY_BYTES_MAX as usize];
        text[..8].copy_from_slice(&space.to_le_bytes());
        text[8..8 + key.len()].copy_from_slice(key);
        KeyDigest(split_words(xxh3_128_with_seed(&text[..8 + key.len()], self.seed)))
    }

    /// The lineage of a key behind its parent's.
    pub(crate) fn extend_lineage(self, parent: KeyLineage, key: &[u8]) -> KeyLineage {
        let mut text = [0; 16 + KEY_BYTES_MAX as usize];
        text[..8].copy_from_slice(&parent.0[0].to_le_bytes());
        text[8..16].copy_from_slice(&parent.0[1].to_le_bytes());
        text[16..16 + key.len()].copy_from_slice(key);
        KeyLineage(split_words(xxh3_128_with_seed(&text[..16 + key.len()], !self.seed)))
    }
}

/// Hashes of a key under a seed, as the index makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHashes {
    /// Hash of the space of keys and the key.
    pub digest: u128,
    /// Hash of all keys up to this one.
    pub lineage: u128,
}

impl KeyHashes {
    /// The hashes of a key behind one of that lineage, 0 for a first key; of keys of at most
    /// [`KEY_BYTES_MAX`] bytes.
    #[must_use]
    pub fn of_key(seed: u64, space: u64, parent_lineage: u128, key: &[u8]) -> Option<Self> {
        if key.is_empty() || key.len() > KEY_BYTES_MAX as usize {
            return None;
        }
        let hasher = KeyHasher { seed };
        let parent = KeyLineage::from_number(parent_lineage);
        let digest = hasher.digest_key(space, key).to_number();
        Some(Self { digest, lineage: hasher.extend_lineage(parent, key).to_number() })
    }
}

impl std::hash::Hash for KeyDigest {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0[0]);
    }
}

/// Passes a digest on: it is a hash already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.is_empty(), "only digests are hashed");
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// Builds a [`DigestHasher`].
pub(crate) type DigestBuild = BuildHasherDefault<DigestHasher>;

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(bytes: &[u8], key_bytes: u32, key_tokens: u32) -> PackedKeys<'_> {
        PackedKeys { bytes, key_bytes, key_tokens }
    }

    #[test]
    fn a_page_is_named_by_the_last_of_its_keys() {
        let bytes: Vec<u8> = (0..18).collect();
        let chain = KeyChain::new(packed(&bytes, 2, 16), 64).unwrap();
        assert_eq!((chain.count_blocks(), chain.count_keys(2)), (2, 8));
        assert_eq!(chain.block_key(0), [6, 7]);
        assert_eq!(chain.block_key(1), [14, 15]);
        let chain = KeyChain::new(packed(&bytes, 2, 64), 64).unwrap();
        assert_eq!((chain.count_blocks(), chain.block_key(8)), (9, &[16, 17][..]));
    }

    #[test]
    fn keys_that_cannot_be_read_are_refused() {
        let refused = |keys| KeyChain::new(keys, 64).unwrap_err();
        assert_eq!(refused(packed(b"", 0, 64)), KeyError::Length { given: 0 });
        assert_eq!(refused(packed(b"", 65, 64)), KeyError::Length { given: 65 });
        assert_eq!(refused(packed(b"abc", 2, 64)), KeyError::Ragged { bytes: 3, key_bytes: 2 });
        for key_tokens in [0, 24, 65, 128] {
            let error = refused(packed(b"ab", 2, key_tokens));
            assert_eq!(error, KeyError::Tokens { key_tokens, block_tokens: 64 });
        }
    }

    #[test]
    fn models_lengths_and_parents_tell_keys_apart() {
        let hasher = KeyHasher { seed: 5 };
        let digest = |model, key: &[u8]| hasher.digest_key(model, key);
        assert_eq!(digest(1, b"a"), digest(1, b"a"));
        assert_ne!(digest(1, b"a"), digest(2, b"a"));
        assert_ne!(digest(1, b"a"), digest(1, b"a\0"));
        assert_ne!(digest(1, b"a"), KeyHasher { seed: 6 }.digest_key(1, b"a"));
        let root = hasher.extend_lineage(KeyLineage::default(), b"a");
        let (child, twin) =
            (hasher.extend_lineage(root, b"b"), hasher.extend_lineage(root, b"b\0"));
        assert_ne!(child, twin);
        assert_ne!(child, hasher.extend_lineage(KeyLineage::default(), b"b"));
    }
}
