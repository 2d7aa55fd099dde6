# fish completion for mula. Load it with: mula completion fish | source
function __mula_complete
	set -l words (commandline -opc)
	set -l cur (commandline -ct)
	set -l lines ($words[1] __complete $words[2..-1] "$cur" 2>/dev/null)
	for line in $lines[2..-1]
		echo $line
	end
	if test "$lines[1]" = files
		__fish_complete_path "$cur"
	end
end
complete -c mula -f -a '(__mula_complete)'
