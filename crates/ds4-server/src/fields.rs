//! A request's JSON object, field by field: what is not taken by name is refused by name.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// Entries of one list. A body's size bounds everything else.
const LIST_MAX: usize = 65_536;

/// An object whose fields are taken out one after the other. `null` is the same as absent.
pub struct Fields {
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// `path` names the object in errors; empty for the body itself.
    pub fn of(value: Value, path: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Fields { path: path.to_string(), map }),
            other => Err(wrong(path, "an object", &other)),
        }
    }

    /// The full name of a field, as errors give it.
    pub fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    pub fn value(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key).filter(|v| !v.is_null())
    }

    /// A field's value, which stays.
    pub fn peek(&self, key: &str) -> Option<Value> {
        self.map.get(key).cloned()
    }

    /// Puts a field back that was looked at.
    pub fn put(&mut self, key: &str, value: Value) {
        self.map.insert(key.to_string(), value);
    }

    pub fn string(&mut self, key: &str) -> Result<Option<String>, ApiError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(wrong(&self.name(key), "a string", &other)),
        }
    }

    pub fn need_string(&mut self, key: &str) -> Result<String, ApiError> {
        self.string(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn bool(&mut self, key: &str) -> Result<Option<bool>, ApiError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(b)),
            Some(other) => Err(wrong(&self.name(key), "true or false", &other)),
        }
    }

    /// A number within bounds, both included.
    pub fn number(&mut self, key: &str, min: f64, max: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64() {
            Some(n) if (min..=max).contains(&n) => Ok(Some(n as f32)),
            _ => Err(wrong(&self.name(key), &format!("a number from {min} to {max}"), &value)),
        }
    }

    /// A whole number within bounds, both included.
    pub fn count(&mut self, key: &str, min: usize, max: usize) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match whole(&value).and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (min..=max).contains(&n) => Ok(Some(n)),
            _ => {
                let range =
                    if max == usize::MAX { format!("{min} or more") } else { format!("from {min} to {max}") };
                Err(wrong(&self.name(key), &format!("a whole number {range}"), &value))
            }
        }
    }

    pub fn integer(&mut self, key: &str) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        whole(&value).map(Some).ok_or_else(|| wrong(&self.name(key), "a whole number", &value))
    }

    /// A list's entries, each with its full name.
    pub fn list(&mut self, key: &str) -> Result<Option<Vec<(String, Value)>>, ApiError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(list)) if list.len() > LIST_MAX => Err(ApiError::invalid(
                &self.name(key),
                format!("{} entries, at most {LIST_MAX} are taken", list.len()),
            )),
            Some(Value::Array(list)) => {
                let name = self.name(key);
                Ok(Some(list.into_iter().enumerate().map(|(i, v)| (format!("{name}[{i}]"), v)).collect()))
            }
            Some(other) => Err(wrong(&self.name(key), "a list", &other)),
        }
    }

    pub fn object(&mut self, key: &str) -> Result<Option<Fields>, ApiError> {
        let name = self.name(key);
        self.value(key).map(|v| Fields::of(v, &name)).transpose()
    }

    /// One of these words.
    pub fn word(&mut self, key: &str, words: &[&'static str]) -> Result<Option<&'static str>, ApiError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let found = value.as_str().and_then(|s| words.iter().find(|w| **w == s));
        found
            .map(|w| Some(*w))
            .ok_or_else(|| wrong(&self.name(key), &format!("one of {}", words.join(", ")), &value))
    }

    pub fn need_word(&mut self, key: &str, words: &[&'static str]) -> Result<&'static str, ApiError> {
        self.word(key, words)?.ok_or_else(|| self.missing(key))
    }

    /// Fields that inform and change nothing here.
    pub fn inform(&mut self, keys: &[&str]) {
        for key in keys {
            self.map.shift_remove(*key);
        }
    }

    /// A field that is taken where it asks for what happens anyway.
    pub fn only(&mut self, key: &str, allowed: &[Value], why: &str) -> Result<(), ApiError> {
        match self.value(key) {
            Some(v) if !allowed.contains(&v) => Err(ApiError::invalid(&self.name(key), why)),
            _ => Ok(()),
        }
    }

    /// Everything that is left, as a value: the object is passed on as it is.
    pub fn rest(self) -> Value {
        Value::Object(self.map)
    }

    /// Everything that is left, for objects whose keys are data.
    pub fn into_pairs(self) -> impl Iterator<Item = (String, Value)> {
        self.map.into_iter()
    }

    pub fn missing(&self, key: &str) -> ApiError {
        let name = self.name(key);
        ApiError::invalid(&name, format!("Missing required parameter: '{name}'."))
            .code("missing_required_parameter")
    }

    /// Nothing may be left.
    pub fn end(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, v)| !v.is_null()) {
            None => Ok(()),
            Some((key, _)) => {
                let name = self.name(key);
                Err(ApiError::invalid(
                    &name,
                    format!("'{name}' is not supported by this server: leave it out."),
                )
                .code("unknown_parameter"))
            }
        }
    }
}

/// A whole number, also where a client writes it as `1.0`.
fn whole(value: &Value) -> Option<i64> {
    let float = || value.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 9e15).map(|f| f as i64);
    value.as_i64().or_else(float)
}

/// An error that says what was expected and what was found.
pub fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    let what = match found {
        Value::Null => "null".to_string(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(s) if s.chars().count() <= 40 => format!("{s:?}"),
        Value::String(_) => "a long string".to_string(),
        Value::Array(_) => "a list".to_string(),
        Value::Object(_) => "an object".to_string(),
    };
    let name = if name.is_empty() { "the body" } else { name };
    ApiError::invalid(name, format!("{name}: expected {expected}, found {what}"))
}

/// One entry's string.
pub fn text(name: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(s) => Ok(s),
        other => Err(wrong(name, "a string", &other)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_taken_is_refused_by_name() {
        let mut f = Fields::of(json!({"a": 1, "b": null, "c": {"d": true, "e": 2}}), "").unwrap();
        assert_eq!(f.count("a", 0, 9).unwrap(), Some(1));
        let mut c = f.object("c").unwrap().unwrap();
        assert_eq!(c.bool("d").unwrap(), Some(true));
        assert_eq!(c.end().unwrap_err().param.as_deref(), Some("c.e"));
        f.end().unwrap();
    }

    #[test]
    fn bounds_and_types() {
        let mut f = Fields::of(json!({"t": 2.5, "n": -1, "s": 3, "w": "x", "i": 1.0}), "").unwrap();
        let e = f.number("t", 0.0, 2.0).unwrap_err();
        assert_eq!(
            (e.param.as_deref(), e.message.as_str()),
            (Some("t"), "t: expected a number from 0 to 2, found 2.5")
        );
        assert!(f.count("n", 0, 5).is_err());
        assert!(f.string("s").is_err());
        assert!(f.word("w", &["y", "z"]).is_err());
        assert_eq!(f.integer("i").unwrap(), Some(1));
        assert!(Fields::of(json!([]), "").is_err());
    }
}
