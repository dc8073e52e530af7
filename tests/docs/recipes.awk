# Turns the recipes of a Markdown file into tests: each block of code after `<!-- recipe: NAME -->` is
# the body of one. `file`: the Markdown file's name, for messages of the compiler.
BEGIN {
  print "// RANKS: 1 2"
  print "// Generated from " file "."
  print "#include <gtest/gtest.h>"
  print "#include \"tests/docs/recipe_setup.h\""
  document = file
  gsub(/.*\/|\.md$/, "", document)
  gsub("-", "", document)
  suite = toupper(substr(document, 1, 1)) substr(document, 2) "RecipesTest"
  print "namespace recipes::" document " {"
  print "namespace {"
}
/^<!-- recipe: / { name = $3; next }
/^```cpp$/ && name != "" {
  print "void Recipe_" name "(std::shared_ptr<Net>& model, std::vector<Batch>& loader, const std::string& folder) {"
  print "  (void)model, (void)loader, (void)folder;"
  print "#line " NR + 1 " \"" file "\""
  inside = 1
  next
}
/^```$/ && inside {
  print "}"
  # Parameters have moved, in the same way on every rank.
  print "TEST(" suite ", " name ") {"
  print "  sirtaki::init();"
  print "  Surroundings around;"
  print "  Recipe_" name "(around.model, around.loader, around.folder);"
  print "  sirtaki::check_parameters(*around.model);"
  print "}"
  inside = 0
  name = ""
  ++count
  next
}
/^```cpp$/ { bare = 1; print "#error " file ": a block of code without a recipe in front of it" }
inside { print }
END {
  print "}  // namespace"
  print "}  // namespace recipes::" document
  if (count == 0 || inside) print "#error " file ": no recipes, or one without an end"
}
