//! Typed access to the keys of a JSON object. A `null` value is as good as an absent key.

use crate::error::{ModelError, Result};
use serde_json::{Map, Value};

/// The keys of an object of `config.json`; `scope` is the object's own key with a dot, or empty.
#[derive(Clone, Copy)]
pub(super) struct ConfigKeys<'a> {
    map: &'a Map<String, Value>,
    scope: &'a str,
}

impl<'a> ConfigKeys<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, scope: &'a str) -> Self {
        Self { map, scope }
    }

    /// All keys with a value that is not `null`.
    pub(super) fn present_keys(self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (&**key, value))
    }

    /// Whether the key is there, be it as `null`.
    pub(super) fn is_written(self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(super) fn value(self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A refusal of `key`.
    pub(super) fn refuse_key(self, key: &str, reason: impl Into<String>) -> ModelError {
        ModelError::key_error(format!("{}{key}", self.scope), reason)
    }

    fn read_typed<T>(
        self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let read = read(value);
        let wrong =
            || self.refuse_key(key, format!("expected {wanted}, found {}", shorten_value(value)));
        read.map(Some).ok_or_else(wrong)
    }

    /// An integer from `least` to `most`.
    pub(super) fn read_count(self, key: &str, least: usize, most: usize) -> Result<Option<usize>> {
        let wanted = format!("an integer from {least} to {most}");
        self.read_typed(key, &wanted, |value| {
            let count = usize::try_from(value.as_u64()?).ok()?;
            (least..=most).contains(&count).then_some(count)
        })
    }

    /// A finite number that is at least `least`.
    pub(super) fn read_number(self, key: &str, least: f64) -> Result<Option<f64>> {
        let wanted = format!("a finite number from {least} on");
        self.read_typed(key, &wanted, |value| {
            value.as_f64().filter(|n| n.is_finite() && *n >= least)
        })
    }

    pub(super) fn read_flag(self, key: &str) -> Result<Option<bool>> {
        self.read_typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn read_word(self, key: &str) -> Result<Option<&'a str>> {
        self.read_typed(key, "a string", Value::as_str)
    }

    pub(super) fn read_words(self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.read_typed(key, "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    /// A list of finite numbers above zero.
    pub(super) fn read_numbers(self, key: &str) -> Result<Option<Vec<f64>>> {
        self.read_typed(key, "a list of finite numbers above 0", |value| {
            let positive = |n: &f64| n.is_finite() && *n > 0.0;
            value.as_array()?.iter().map(|value| value.as_f64().filter(positive)).collect()
        })
    }

    /// An object; an empty one is as good as none.
    pub(super) fn read_object(self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        let object = self.read_typed(key, "an object", Value::as_object)?;
        Ok(object.filter(|object| !object.is_empty()))
    }

    /// Returns `read`, or an error for a key that must be there.
    pub(super) fn require_key<T>(self, key: &str, read: Option<T>) -> Result<T> {
        read.ok_or_else(|| self.refuse_key(key, "the key is missing"))
    }
}

/// A value as messages show it.
pub(super) fn shorten_value(value: &Value) -> String {
    const CHARACTERS_MAX: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= CHARACTERS_MAX {
        return text;
    }
    text.chars().take(CHARACTERS_MAX).chain("...".chars()).collect()
}
