//! What an answer may look like.

use serde_json::Value;

/// Limits the tokens that may be generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Constraint {
    pub form: Form,
    /// Free text comes first, up to and including this token (`</think>`); the form holds for what follows.
    pub after: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Any JSON object.
    JsonObject,
    /// JSON that the schema accepts.
    JsonSchema(Value),
    Regex(String),
    /// A grammar in Lark's notation, as `llguidance` reads it; special tokens are written `<[id]>`.
    Lark(String),
}
