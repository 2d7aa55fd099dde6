# bash completion for mula. Load it with: source <(mula completion bash)
_mula() {
	local line mode= cur=${COMP_WORDS[COMP_CWORD]}
	[ "$cur" = = ] && cur=
	COMPREPLY=()
	while IFS= read -r line; do
		if [ -z "$mode" ]; then
			mode=$line
		else
			COMPREPLY+=("${line%%$'\t'*}")
		fi
	done < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
	if [ "${COMPREPLY[0]: -1}" = = ]; then # of mula train --set
		compopt -o nospace 2>/dev/null
	fi
	if [ "$mode" = files ]; then
		compopt -o filenames 2>/dev/null
		while IFS= read -r line; do
			COMPREPLY+=("$line")
		done < <(compgen -f -- "$cur")
	fi
}
complete -F _mula mula
