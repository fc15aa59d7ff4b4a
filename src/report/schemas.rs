//! The published JSON Schemas of neap's files, made from the types that read them.
//!
//! For: the files in `schemas/`, compared with these in the tests. Not for: validating a file; reading it does, and says more.

use std::marker::PhantomData;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use crate::device::Profile;
use crate::job::json::GraphFile;
use crate::schedule::json::PlanFile;

/// Each schema's file name and its text.
#[must_use]
pub fn all() -> Vec<(&'static str, String)> {
    vec![
        ("device.schema.json", text(with_header(of::<Profile>(PhantomData), "neap.device"))),
        ("graph.schema.json", text(of::<GraphFile<'_>>(PhantomData))),
        ("plan.schema.json", text(of::<PlanFile<'_>>(PhantomData))),
    ]
}

/// What files of a type may hold to be read.
fn of<T: JsonSchema>(_: PhantomData<T>) -> Schema {
    SchemaSettings::draft2020_12().for_deserialize().into_generator().into_root_schema_for::<T>()
}

/// Adds the format and version, for a type that is written behind them.
fn with_header(mut schema: Schema, format: &str) -> Schema {
    schema.insert("title".to_owned(), format.into());
    for (key, value) in [("format", json!(format)), ("version", json!(1))] {
        if let Some(Value::Object(properties)) = schema.get_mut("properties") {
            properties.insert(key.to_owned(), json!({ "const": value }));
        }
        if let Some(Value::Array(required)) = schema.get_mut("required") {
            required.push(key.into());
        }
    }
    schema
}

fn text(schema: Schema) -> String {
    format!("{:#}\n", Value::from(schema))
}
