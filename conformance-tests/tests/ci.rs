//! Holds what runs in CI, the Makefile and the table of images together.

use leasehold_conformance::fixtures::IMAGES;

const WORKFLOW: &str = include_str!("../../.github/workflows/ci.yml");
const CI: &str = include_str!("../../.ci/run");
const FACADE: &str = include_str!("../../leasehold/Cargo.toml");
const MAKEFILE: &str = include_str!("../../Makefile");

#[test]
fn the_matrix_is_the_table_of_images() {
    let rows = WORKFLOW.lines().filter_map(|line| {
        let row = line.trim().strip_prefix("- { store: ")?;
        let (store, image) = row.split_once(", image: \"")?;
        Some((store, image.split('"').next()?))
    });
    let table = IMAGES.iter().map(|image| (image.store, image.name));
    assert_eq!(rows.collect::<Vec<_>>(), table.collect::<Vec<_>>());
}

#[test]
fn each_feature_of_the_facade_is_checked_alone() {
    let features = FACADE.split("[features]").nth(1).unwrap_or_default();
    let features = features.lines().take_while(|line| !line.starts_with('['));
    let features = features.filter_map(|line| line.split_once(" = ").map(|(name, _)| name));
    let mut features: Vec<_> = features.filter(|name| *name != "default").collect();
    features.insert(0, "none");
    let list = |text: &'static str, begin: &str| {
        let line = text
            .lines()
            .find_map(|line| line.trim().strip_prefix(begin));
        let names = line.unwrap_or_default().trim_end_matches(']');
        let names = names.split([' ', ',']).filter(|name| !name.is_empty());
        names.collect::<Vec<_>>()
    };
    assert_eq!(list(MAKEFILE, "FEATURES ?= "), features);
    assert_eq!(list(WORKFLOW, "features: ["), features);
}

#[test]
fn every_target_that_ci_makes_is_in_the_makefile() {
    let made = |text: &'static str| {
        let commands = text.lines().map(str::trim_start).filter_map(|line| {
            let line = line.strip_prefix("- run:").unwrap_or(line).trim_start();
            line.strip_prefix("make ")
        });
        commands.map(|command| command.split(' ').next().unwrap_or_default())
    };
    let targets: Vec<_> = made(WORKFLOW).chain(made(CI)).collect();
    for name in ["lint", "test", "test-containers", "test-image", "example"] {
        assert!(targets.contains(&name), "CI does not make {name}");
    }
    for name in targets {
        let defined = MAKEFILE
            .lines()
            .any(|line| line.split(':').next() == Some(name));
        assert!(defined, "the Makefile has no target {name}");
    }
}

#[test]
fn every_script_that_ci_runs_is_there() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let words = WORKFLOW.lines().chain(CI.lines()).chain(MAKEFILE.lines());
    let words = words.filter(|line| !line.trim_start().starts_with('#'));
    let scripts = words
        .flat_map(str::split_whitespace)
        .filter(|word| word.trim_start_matches('@').starts_with("scripts/"));
    for script in scripts {
        let script = root.join(script.trim_start_matches('@'));
        assert!(script.is_file(), "{}", script.display());
    }
}
