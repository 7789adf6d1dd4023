mod fanout;
#[cfg(test)]
mod model;
mod node;
mod quorum;
mod time;
mod tokens;
