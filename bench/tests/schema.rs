//! What `-J` writes is what `schema/result-1.json` says.

mod support;

use serde_json::Value;
use support::schema::errors;
use support::{bench, file, json, text};

fn schema() -> Value {
    serde_json::from_str(include_str!("../schema/result-1.json")).unwrap()
}

/// A result with rows of every kind that this machine can make.
fn result(name: &str, flags: &str) -> Value {
    let path = file(name);
    let output = bench(&format!(
        "{flags} -n 300 -w 20 -N 1 -T 30 -D 0.1 -e 64 --depth 64 --batch 1 --rate 0.05 -J {}",
        path.display()
    ));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    json(&path)
}

#[test]
fn a_result_of_every_layer_follows_the_schema() {
    let json = result("schema.json", "--stages -H -U");
    assert_eq!(errors(&schema(), &json), [""; 0]);
    let rows = json["results"].as_array().unwrap();
    for kind in ["time_us", "rate_mops", "bandwidth_gb_per_s", "reference", "share_percent"] {
        assert!(rows.iter().any(|row| !row[kind].is_null()), "no row has {kind}");
    }
    // With -H and -U there is every time that counted.
    for row in rows.iter().filter(|row| row["layer"] == "put" && row["time_us"].is_object()) {
        let all = row["samples_us"].as_array().map(Vec::len);
        let counted = |bin: &Value| bin["count"].as_u64().unwrap();
        let binned = row["histogram"].as_array().map(|bins| bins.iter().map(counted).sum::<u64>());
        let expected = (row["phase"] == "warm").then(|| row["iterations"].as_u64().unwrap());
        assert_eq!((all.map(|all| all as u64), binned), (expected, expected), "{row}");
    }
    assert!(json["layers"].as_array().unwrap().iter().any(|layer| layer["status"] == "ran"));
}

/// The control: a key less, or a value of another type, anywhere, and it no longer does.
#[test]
fn a_missing_key_or_another_type_is_found_wherever_it_is() {
    let (schema, json) = (schema(), result("schema-control.json", ""));
    let mut places = Vec::new();
    all(&json, "", &mut places);
    assert!(places.len() > 100, "{}", places.len());
    for place in &places {
        let mut other = json.clone();
        // No place may hold this.
        *other.pointer_mut(place).unwrap() = serde_json::json!([[0]]);
        assert!(!errors(&schema, &other).is_empty(), "another type at {place}");

        let (parent, key) = place.rsplit_once('/').unwrap();
        // Maps and lists may have as many entries as there are.
        let free = ["/argv", "/shape", "/env"].iter().any(|map| parent.ends_with(map));
        let mut less = json.clone();
        let Some(object) = less.pointer_mut(parent).and_then(Value::as_object_mut).filter(|_| !free) else {
            continue;
        };
        object.remove(key).unwrap();
        assert!(!errors(&schema, &less).is_empty(), "nothing at {place}");
    }
    let mut other = json.clone();
    other["schema"] = 2.into();
    assert!(!errors(&schema, &other).is_empty());
}

/// A pointer to every value below this one.
fn all(value: &Value, at: &str, places: &mut Vec<String>) {
    let below: Vec<(String, &Value)> = match value {
        Value::Object(object) => object.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(n, value)| (n.to_string(), value)).collect(),
        _ => return,
    };
    for (key, value) in below {
        let at = format!("{at}/{key}");
        places.push(at.clone());
        all(value, &at, places);
    }
}
