//! Metadata: typed values under dotted keys.

use std::collections::HashMap;

use crate::Result;
use crate::error::Error;
use crate::reader::Cursor;

/// One metadata value. Arrays keep their element type.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    String(String),
    Integers(Vec<i64>),
    Floats(Vec<f64>),
    Bools(Vec<bool>),
    Strings(Vec<String>),
}

impl Value {
    fn describe(&self) -> String {
        match self {
            Self::U64(v) => format!("the integer {v}"),
            Self::I64(v) => format!("the integer {v}"),
            Self::F64(v) => format!("the number {v}"),
            Self::Bool(v) => format!("the boolean {v}"),
            Self::String(v) => format!("the string {:?}", v.chars().take(40).collect::<String>()),
            Self::Integers(v) => format!("an array of {} integers", v.len()),
            Self::Floats(v) => format!("an array of {} numbers", v.len()),
            Self::Bools(v) => format!("an array of {} booleans", v.len()),
            Self::Strings(v) => format!("an array of {} strings", v.len()),
        }
    }
}

/// A value and the type it has in a file.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    value: Value,
    kind: Kind,
}

/// Type numbers as in the file: of the value, and of an array's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub value: u32,
    pub element: u32,
}

impl Value {
    /// The narrowest of the usual types: 32 bits where every number fits.
    fn natural_kind(&self) -> Kind {
        let scalar = |value| Kind { value, element: 0 };
        let array = |element| Kind { value: ARRAY, element };
        match self {
            Self::U64(v) => scalar(if u32::try_from(*v).is_ok() { 4 } else { 10 }),
            Self::I64(v) => scalar(if i32::try_from(*v).is_ok() { 5 } else { 11 }),
            Self::F64(_) => scalar(6),
            Self::Bool(_) => scalar(7),
            Self::String(_) => scalar(8),
            Self::Integers(v) => array(if v.iter().all(|i| i32::try_from(*i).is_ok()) { 5 } else { 11 }),
            Self::Floats(_) => array(6),
            Self::Bools(_) => array(7),
            Self::Strings(_) => array(8),
        }
    }
}

/// All keys of a file. A copied file keeps the width of every number.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    values: HashMap<String, Entry>,
    order: Vec<String>,
}

impl Metadata {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).map(|e| &e.value)
    }

    /// Sets a key. Its numbers will be written in 32 bits where they fit, which is what readers of these keys expect.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) {
        let kind = value.natural_kind();
        self.insert_as(key.into(), value, kind);
    }

    /// Removes a key; the others keep their order.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let entry = self.values.remove(key)?;
        self.order.retain(|k| k != key);
        Some(entry.value)
    }

    pub(crate) fn insert_as(&mut self, key: String, value: Value, kind: Kind) {
        if self.values.insert(key.clone(), Entry { value, kind }).is_none() {
            self.order.push(key);
        }
    }

    /// Keys in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries().map(|(key, value, _)| (key, value))
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &Value, Kind)> {
        self.order.iter().filter_map(|k| self.values.get(k).map(|e| (k.as_str(), &e.value, e.kind)))
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    fn need(&self, key: &str) -> Result<&Value> {
        self.get(key).ok_or_else(|| Error::MissingKey { key: key.to_string() })
    }

    fn wrong<T>(key: &str, found: &Value, expected: &'static str) -> Result<T> {
        Err(Error::WrongType { key: key.to_string(), found: found.describe(), expected })
    }

    /// A non-negative integer of any width; a boolean counts as 0 or 1.
    pub fn u64(&self, key: &str) -> Result<u64> {
        match self.need(key)? {
            Value::U64(v) => Ok(*v),
            Value::I64(v) if *v >= 0 => Ok(*v as u64),
            Value::Bool(b) => Ok(u64::from(*b)),
            other => Self::wrong(key, other, "a non-negative integer"),
        }
    }

    /// A number of any kind.
    pub fn f32(&self, key: &str) -> Result<f32> {
        match self.need(key)? {
            Value::F64(v) => Ok(*v as f32),
            Value::U64(v) => Ok(*v as f32),
            Value::I64(v) => Ok(*v as f32),
            other => Self::wrong(key, other, "a number"),
        }
    }

    pub fn bool(&self, key: &str) -> Result<bool> {
        match self.need(key)? {
            Value::Bool(b) => Ok(*b),
            other => Self::wrong(key, other, "a boolean"),
        }
    }

    pub fn str(&self, key: &str) -> Result<&str> {
        match self.need(key)? {
            Value::String(s) => Ok(s),
            other => Self::wrong(key, other, "a string"),
        }
    }

    pub fn array_u64(&self, key: &str) -> Result<Vec<u64>> {
        match self.need(key)? {
            Value::Integers(v) => v
                .iter()
                .map(|i| {
                    u64::try_from(*i).or_else(|_| Self::wrong(key, &Value::I64(*i), "non-negative integers"))
                })
                .collect(),
            other => Self::wrong(key, other, "an array of integers"),
        }
    }

    pub fn array_i64(&self, key: &str) -> Result<&[i64]> {
        match self.need(key)? {
            Value::Integers(v) => Ok(v),
            other => Self::wrong(key, other, "an array of integers"),
        }
    }

    pub fn array_f32(&self, key: &str) -> Result<Vec<f32>> {
        match self.need(key)? {
            Value::Floats(v) => Ok(v.iter().map(|x| *x as f32).collect()),
            Value::Integers(v) => Ok(v.iter().map(|x| *x as f32).collect()),
            other => Self::wrong(key, other, "an array of numbers"),
        }
    }

    pub fn array_str(&self, key: &str) -> Result<&[String]> {
        match self.need(key)? {
            Value::Strings(v) => Ok(v),
            other => Self::wrong(key, other, "an array of strings"),
        }
    }
}

pub(crate) const ARRAY: u32 = 9;

/// Reads one value of the given type number.
pub(crate) fn read_value(c: &mut Cursor<'_>, key: &str, kind: u32) -> Result<(Value, Kind)> {
    if kind == ARRAY {
        let (value, element) = read_array(c, key)?;
        return Ok((value, Kind { value: ARRAY, element }));
    }
    let value = match kind {
        0 => Value::U64(c.u8(key)?.into()),
        1 => Value::I64((c.u8(key)? as i8).into()),
        2 => Value::U64(c.u16(key)?.into()),
        3 => Value::I64((c.u16(key)? as i16).into()),
        4 => Value::U64(c.u32(key)?.into()),
        5 => Value::I64((c.u32(key)? as i32).into()),
        6 => Value::F64(f32::from_bits(c.u32(key)?).into()),
        7 => Value::Bool(c.bool(key)?),
        8 => Value::String(c.string(key)?),
        10 => Value::U64(c.u64(key)?),
        11 => Value::I64(c.u64(key)? as i64),
        12 => Value::F64(f64::from_bits(c.u64(key)?)),
        _ => return Err(c.malformed(key, format!("value type {kind} does not exist"))),
    };
    Ok((value, Kind { value: kind, element: 0 }))
}

/// An array and its elements' type number.
fn read_array(c: &mut Cursor<'_>, key: &str) -> Result<(Value, u32)> {
    let kind = c.u32(key)?;
    let len = c.u64(key)?;
    let smallest = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        ARRAY => return Err(c.malformed(key, "arrays of arrays are not supported".into())),
        _ => return Err(c.malformed(key, format!("array element type {kind} does not exist"))),
    };
    let len = c.count(key, len, smallest)?;
    let value = match kind {
        6 | 12 => {
            let mut v = Vec::with_capacity(len);
            for _ in 0..len {
                v.push(if kind == 6 {
                    f32::from_bits(c.u32(key)?).into()
                } else {
                    f64::from_bits(c.u64(key)?)
                });
            }
            Value::Floats(v)
        }
        7 => Value::Bools((0..len).map(|_| c.bool(key)).collect::<Result<_>>()?),
        8 => Value::Strings((0..len).map(|_| c.string(key)).collect::<Result<_>>()?),
        _ => {
            let mut v = Vec::with_capacity(len);
            for _ in 0..len {
                v.push(match kind {
                    0 => c.u8(key)?.into(),
                    1 => (c.u8(key)? as i8).into(),
                    2 => c.u16(key)?.into(),
                    3 => (c.u16(key)? as i16).into(),
                    4 => c.u32(key)?.into(),
                    5 => (c.u32(key)? as i32).into(),
                    10 => {
                        let x = c.u64(key)?;
                        i64::try_from(x)
                            .map_err(|_| c.malformed(key, format!("integer {x} is out of range")))?
                    }
                    _ => c.u64(key)? as i64,
                });
            }
            Value::Integers(v)
        }
    };
    Ok((value, kind))
}
