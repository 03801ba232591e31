use axum::Json;
use serde_json::{Value, json};
pub async fn document() -> Json<Value> {
    Json(json!({}))
}
