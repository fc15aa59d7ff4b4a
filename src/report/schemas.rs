//! The published JSON Schemas of neap's files, made from the types that read them.
//!
//! A test compares them with the files in `schemas/`. Reading a file validates it, with better
//! errors.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use crate::contract::json::PlanFile;
use crate::device::predictor::Predictor;
use crate::device::profile::Document;
use crate::job::json::GraphFile;

/// Each schema's file name and its text.
#[must_use]
pub fn all() -> Vec<(&'static str, String)> {
    vec![
        ("device.schema.json", text::<Document>("neap.device")),
        ("graph.schema.json", text::<GraphFile<'_>>("neap.graph")),
        ("plan.schema.json", text::<PlanFile<'_>>("neap.plan")),
        ("predictor.schema.json", text::<Predictor>("neap.predictor")),
    ]
}

/// The schema of the files that are read as `T`.
fn text<T: JsonSchema>(format: &str) -> String {
    let mut schema = SchemaSettings::draft2020_12()
        .for_deserialize()
        .into_generator()
        .into_root_schema_for::<T>();
    schema.insert("title".to_owned(), format.into());
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.insert("format".to_owned(), json!({ "const": format }));
        let versions = if format == "neap.predictor" { json!([1]) } else { json!([1, 2]) };
        properties.insert("version".to_owned(), json!({ "enum": versions }));
    }
    format!("{:#}\n", Value::from(schema))
}
