"""What every engine has to keep, whatever it computes with: one suite, played by the ranks of one group."""
