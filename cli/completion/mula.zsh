#compdef mula
# zsh completion for mula. Load it with: source <(mula completion zsh)
_mula() {
	local -a lines described
	local line mode
	lines=("${(@f)$(${words[1]} __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
	mode=${lines[1]}
	for line in "${(@)lines[2,-1]}"; do
		described+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
	done
	(( $#described )) && _describe 'mula' described
	if [[ $mode == files ]]; then
		compset -P '--*='
		_files
	fi
}
if [ "${funcstack[1]}" = _mula ]; then
	_mula "$@"
else
	compdef _mula mula
fi
