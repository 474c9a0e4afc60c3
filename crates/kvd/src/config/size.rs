//! Sizes as they are written: `4 GiB`, or a number of bytes.

use bytesize::ByteSize;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SizeSetting(u64);

/// Examples of sizes, for messages.
const EXPECTED: &str = "a size such as 4 GiB, 512 MiB or 1048576";

impl SizeSetting {
    /// A size of so many bytes.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl FromStr for SizeSetting {
    type Err = String;

    /// A number with a unit or without, decimals too: `1.5 GiB`, `64MiB`, `2 GB`, `4096`.
    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("{text:?} is not {EXPECTED}");
        let size: ByteSize = text.trim().parse().map_err(|_| refused())?;
        // The parser counts in floats, which end at the largest number of bytes.
        match size.as_u64() {
            u64::MAX => Err(format!("{text:?} is more than a size can be, 16 EiB")),
            bytes => Ok(Self(bytes)),
        }
    }
}

impl fmt::Display for SizeSetting {
    /// In the largest unit that divides it, so that nothing is rounded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let divides = |(unit, _): &&(u64, &str)| self.0 > 0 && self.0.is_multiple_of(*unit);
        match UNITS.iter().find(divides) {
            Some((unit, name)) => write!(f, "{} {name}", self.0 / unit),
            None => write!(f, "{} B", self.0),
        }
    }
}

impl Serialize for SizeSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SizeSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeText;
        impl Visitor<'_> for SizeText {
            type Value = SizeSetting;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<SizeSetting, E> {
                Ok(SizeSetting(bytes))
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<SizeSetting, E> {
                let size = u64::try_from(bytes).map(SizeSetting);
                size.map_err(|_| E::custom(format!("{bytes} is not {EXPECTED}")))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<SizeSetting, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(SizeText)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_written_exactly_and_read_back() {
        for (bytes, text) in [
            (0, "0 B"),
            (1, "1 B"),
            (1000, "1000 B"),
            (1 << 10, "1 KiB"),
            (3 << 29, "1536 MiB"),
            ((1 << 30) + 1, "1073741825 B"),
            (1 << 40, "1 TiB"),
            (u64::MAX - 2047, "18014398509481982 KiB"),
        ] {
            let size = SizeSetting::from_bytes(bytes);
            assert_eq!(size.to_string(), text);
            if bytes < 1 << 53 {
                assert_eq!(text.parse(), Ok(size));
            }
        }
    }

    #[test]
    fn what_is_no_size_is_told_what_is() {
        for text in ["lots", "", "GiB", "4 XiB", "-1 GiB", "1e99 GiB", "NaN"] {
            let error = text.parse::<SizeSetting>().expect_err(text);
            assert!(error.contains("a size such as 4 GiB"), "{error}");
        }
        for text in ["99999999999 PiB", "99999999999999999999 GiB"] {
            let error = text.parse::<SizeSetting>().expect_err(text);
            assert!(error.contains("more than a size can be"), "{error}");
        }
    }
}
