# PowerShell completion for mula. Load it with: mula completion powershell | Out-String | Invoke-Expression
Register-ArgumentCompleter -Native -CommandName mula -ScriptBlock {
	param($wordToComplete, $commandAst, $cursorPosition)
	$words = @($commandAst.CommandElements | Where-Object { $_.Extent.EndOffset -lt $cursorPosition } |
		Select-Object -Skip 1 | ForEach-Object { $_.ToString() })
	# A space instead of an empty word: old versions of PowerShell drop empty arguments.
	$current = if ($wordToComplete) { $wordToComplete } else { ' ' }
	$lines = @(& $commandAst.CommandElements[0].ToString() __complete @words $current 2>$null)
	$lines | Select-Object -Skip 1 | ForEach-Object {
		$value, $text = $_ -split "`t", 2
		if (-not $text) { $text = $value }
		[System.Management.Automation.CompletionResult]::new($value, $value, 'ParameterValue', $text)
	}
	if ($lines.Count -gt 0 -and $lines[0] -eq 'files') {
		[System.Management.Automation.CompletionCompleters]::CompleteFilename($wordToComplete)
	}
}
