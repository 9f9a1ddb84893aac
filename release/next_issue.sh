#!/usr/bin/env bash
# Opens an issue with what `make test-next` has written, unless one of this title is open.
set -eu
title="The next TensorFlow or Keras fails"
open=$(gh issue list --state open --search "in:title \"$title\"" --json title --jq '.[].title')
if grep -qFx "$title" <<<"$open"; then
	echo "an issue is open already: $title"
else
	gh issue create --title "$title" --body-file target/next.md
fi
