//! Checks JSON against the part of JSON Schema that the crate's schema is written in. A keyword that is not known here is a
//! mistake in the schema, and so is a key of the data that the schema does not name.

use serde_json::{Map, Value};

/// Everything that is wrong, each with its place.
pub fn errors(schema: &Value, data: &Value) -> Vec<String> {
    let mut errors = Vec::new();
    check(schema, schema, data, "", &mut errors);
    errors
}

fn check(root: &Value, schema: &Value, data: &Value, at: &str, errors: &mut Vec<String>) {
    let empty = Map::new();
    let schema = schema.as_object().expect("a schema is an object");
    let properties = schema.get("properties").map_or(&empty, |value| value.as_object().unwrap());
    for (keyword, value) in schema {
        let mut wrong = |text: String| errors.push(format!("{at}: {text}"));
        match keyword.as_str() {
            "$schema" | "$defs" | "title" | "description" => {}
            "$ref" => {
                let pointer = value.as_str().unwrap().strip_prefix('#').expect("within the schema");
                check(root, root.pointer(pointer).expect(pointer), data, at, errors);
            }
            "type" => {
                let allowed = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
                if !allowed.iter().any(|name| is(name.as_str().unwrap(), data)) {
                    wrong(format!("{data} is not {value}"));
                }
            }
            "const" if data != value => wrong(format!("{data} is not {value}")),
            "enum" if !value.as_array().unwrap().contains(data) => wrong(format!("{data} is not in {value}")),
            "const" | "enum" => {}
            "minimum" => {
                if data.as_f64().is_some_and(|number| number < value.as_f64().unwrap()) {
                    wrong(format!("{data} is below {value}"));
                }
            }
            "required" => {
                let keys = value.as_array().unwrap().iter().map(|key| key.as_str().unwrap());
                for key in keys.filter(|key| data.is_object() && data.get(key).is_none()) {
                    wrong(format!("no {key}"));
                }
            }
            "properties" | "additionalProperties" => {}
            "items" => {
                for (n, item) in data.as_array().into_iter().flatten().enumerate() {
                    check(root, value, item, &format!("{at}/{n}"), errors);
                }
            }
            unknown => panic!("the schema has the keyword {unknown}"),
        }
    }
    let is_closed = schema.contains_key("properties") || schema.contains_key("additionalProperties");
    for (key, value) in data.as_object().into_iter().flatten().filter(|_| is_closed) {
        match properties.get(key).or(schema.get("additionalProperties")) {
            Some(schema) => check(root, schema, value, &format!("{at}/{key}"), errors),
            None => errors.push(format!("{at}: the schema does not name {key}")),
        }
    }
}

fn is(name: &str, data: &Value) -> bool {
    match name {
        "null" => data.is_null(),
        "boolean" => data.is_boolean(),
        "integer" => data.is_u64() || data.is_i64(),
        "number" => data.is_number(),
        "string" => data.is_string(),
        "array" => data.is_array(),
        "object" => data.is_object(),
        other => panic!("the schema has the type {other}"),
    }
}
