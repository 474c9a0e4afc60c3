//! Bearer tokens: made at random, kept as hashes, compared in constant time.

use sha2::{Digest, Sha256};
use std::fmt;
use subtle::{Choice, ConstantTimeEq};

/// Random bytes of a token: nobody guesses one, so a hash without a salt keeps it.
const TOKEN_BYTES: usize = 32;
/// How tokens begin, so that scanners of secrets find them.
const TOKEN_PREFIX: &str = "kvd_";
/// How hashes begin.
const HASH_PREFIX: &str = "sha256:";
const HASH_BYTES: usize = 32;

/// The hash of a token.
#[derive(Clone, Copy)]
pub(crate) struct TokenHash([u8; HASH_BYTES]);

impl TokenHash {
    /// The hash of a token.
    #[must_use]
    pub(crate) fn of_token(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    /// Reads `sha256:` and 64 hexadecimal digits.
    #[must_use]
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(HASH_PREFIX)?;
        if digits.len() != 2 * HASH_BYTES || !digits.is_ascii() {
            return None;
        }
        let mut bytes = [0; HASH_BYTES];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// Whether both are of one token, in a time that tells nothing of where they differ.
    pub(super) fn is_same(&self, other: &Self) -> Choice {
        self.0.ct_eq(&other.0)
    }
}

impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HASH_PREFIX)?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(..)")
    }
}

/// A token that was just made, and what the daemon keeps of it.
pub(crate) struct NewToken {
    /// For the client, told once.
    pub(crate) token: String,
    /// For the file of principals.
    pub(crate) hash: TokenHash,
}

impl NewToken {
    /// One from the system's random numbers.
    ///
    /// # Errors
    /// When the system gives none.
    pub(crate) fn draw_token() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes)?;
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let token = format!("{TOKEN_PREFIX}{digits}");
        Ok(Self { hash: TokenHash::of_token(token.as_bytes()), token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_round_trip_and_tell_nothing() {
        let made = NewToken::draw_token().unwrap();
        let text = made.hash.to_string();
        let read = TokenHash::from_text(&text).unwrap();
        assert!(bool::from(read.is_same(&TokenHash::of_token(made.token.as_bytes()))));
        assert!(!bool::from(read.is_same(&TokenHash::of_token(b"another"))));
        assert_eq!(format!("{read:?}"), "TokenHash(..)");
        assert_ne!(made.token, NewToken::draw_token().unwrap().token);
        // The standard's own example.
        let of_abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(TokenHash::of_token(b"abc").to_string(), of_abc);
        for bad in ["", "sha256:", "sha256:00", &of_abc[7..], &of_abc.replace('b', "g")] {
            assert!(TokenHash::from_text(bad).is_none(), "{bad}");
        }
    }
}
