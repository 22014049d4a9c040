//! `memtrace mcp`: serves runs to agents over the Model Context Protocol.
//!
//! The server is built with the feature `mcp`. Without it the build is shorter, and this command is an error.

use crate::cli::Mcp;

/// Serves one client until it closes stdin.
#[cfg(feature = "mcp")]
pub(crate) fn mcp(options: &Mcp) -> anyhow::Result<()> {
    crate::mcp::serve(options.allow_run)
}

/// Says how to get a memtrace with the server.
#[cfg(not(feature = "mcp"))]
pub(crate) fn mcp(_options: &Mcp) -> anyhow::Result<()> {
    let help = "install the wheel gpu-memtrace, or build memtrace with the server: cargo install --locked --path \
                launcher --features mcp";
    Err(crate::message::WithHelp::new("this memtrace was built without the server for agents", help).into())
}

#[cfg(all(test, not(feature = "mcp")))]
mod tests {
    use super::*;
    use crate::message::help_of;

    #[test]
    fn a_build_without_the_server_names_the_feature() {
        let error = mcp(&Mcp { allow_run: false }).unwrap_err();
        assert_eq!(error.to_string(), "this memtrace was built without the server for agents");
        assert!(help_of(&error).unwrap().ends_with("--features mcp"));
    }
}
